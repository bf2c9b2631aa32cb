"""Names on the command line and in the file: typos, places, what is refused."""

from __future__ import annotations

from random import Random

from mt_megatron.config.megatron_lm_arguments import ALIASES, REFUSED
from mt_megatron.config.types import NOT_SETTABLE, SECTIONS, options
from tests.bad_input.cases import Case, Promise, as_yaml
from tests.bad_input.rules import alone, flag, promise, rule


def typo(name: str, rng: Random) -> str:
    """``name`` with two letters swapped, one left out or one doubled, inside."""
    while True:
        at = rng.randrange(1, len(name) - 1)
        kind = rng.randrange(3)
        if kind == 0:
            wrong = name[:at] + name[at + 1] + name[at] + name[at + 2 :]
        elif kind == 1:
            wrong = name[:at] + name[at + 1 :]
        else:
            wrong = name[:at] + name[at] + name[at:]
        known = {*options(), *(each.replace("-", "_") for each in ALIASES), *NOT_SETTABLE}
        known |= {each.replace("-", "_") for each in REFUSED}
        known |= {"no_" + each for each in options()}
        if wrong not in known and wrong.replace("-", "_") not in known:
            return wrong


@rule
def flags_with_a_typo(case: Case, rng: Random) -> Promise:
    name = rng.choice([each for each in options() if len(each) > 6])
    wrong = flag(typo(name, rng))
    case.extra_flags = [wrong, "1"]
    return Promise(option=wrong, found="there is no option", change="Did you mean")


@rule
def flags_in_another_case(case: Case, rng: Random) -> Promise:
    name = rng.choice([each for each in options() if len(each) > 6])
    wrong = rng.choice([flag(name).upper(), flag(name).title(), "--" + name.title().replace("_", "")])
    if wrong.lower().replace("-", "") != wrong.replace("-", ""):
        case.extra_flags = [wrong, "1"]
    return Promise(option=wrong, found="there is no option", change=flag(name))


@rule
def keys_with_a_typo(case: Case, rng: Random) -> Promise:
    name = rng.choice([each for each in options() if len(each) > 6])
    wrong = typo(name, rng)
    case.yaml_text = f"{options()[name].section}:\n  {wrong}: 1\n"
    return Promise(option=wrong, found="run.yaml:2", change="Did you mean")


@rule
def sections_with_a_typo(case: Case, rng: Random) -> Promise:
    section = rng.choice(list(SECTIONS))
    wrong = rng.choice([section[:-1], section + "s", section.upper(), section.title(), section[1:]])
    if wrong in SECTIONS:
        wrong = section + "x"
    case.yaml_text = f"{wrong}:\n  num_layers: 2\n"
    return Promise(option=repr(wrong), found="run.yaml:2", change="expected one of model, parallel")


@rule
def keys_in_the_wrong_section(case: Case, rng: Random) -> Promise:
    option = options()[rng.choice(list(options()))]
    section = rng.choice([each for each in SECTIONS if each != option.section])
    case.yaml_text = f"{section}:\n  {option.name}: 1\n"
    return Promise(option=option.name, found=repr(section), change="Move it there")


@rule
def keys_without_a_section(case: Case, rng: Random) -> Promise:
    option = options()[rng.choice(list(options()))]
    case.yaml_text = f"{option.name}: 1\n"
    return Promise(option=option.name, found="run.yaml:1", change=f"{option.section}:")


@rule
def sections_within_sections(case: Case, rng: Random) -> Promise:
    case.yaml_text = "train:\n  parallel:\n    tensor_model_parallel_size: 2\n"
    return Promise(option="parallel", found="run.yaml:2", change="is unknown")


@rule
def keys_written_twice(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(case.values))
    text = as_yaml({name: case.values[name]})
    case.yaml_text = text + text.split("\n", 1)[1]
    return Promise(option=name, found="written twice", change="Keep one of them")


@rule
def sections_written_twice(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(case.values))
    case.yaml_text = 2 * as_yaml({name: case.values[name]})
    return Promise(option=options()[name].section, found="written twice", change="Keep one of them")


@rule
def lists_where_values_belong(case: Case, rng: Random) -> Promise:
    name = rng.choice([each.name for each in options().values() if not each.is_list])
    value = rng.choice([[1, 2], {"a": 1}, [[]]])
    case.yaml_text = as_yaml({name: value})
    return promise(name, str(value), "expected")


@rule
def words_that_are_no_options(case: Case, rng: Random) -> Promise:
    word = rng.choice(["num-layers=4", "-n4", "pretrain", "4"])
    case.extra_flags = ["--bf16", "--", word] if word != "-n4" else ["--", word]
    return Promise(option="'--'", found="--", change="Options start with --")


@rule
def refused_arguments(case: Case, rng: Random) -> Promise:
    name = rng.choice(list(REFUSED))
    case.extra_flags = [f"--{name}"]
    return Promise(option=f"--{name}", found="Megatron-LM 0.9 that is refused", change=REFUSED[name])


@rule
def fields_that_cannot_be_set(case: Case, rng: Random) -> Promise:
    elsewhere = {each.replace("-", "_") for each in (*REFUSED, *ALIASES)}
    name = rng.choice([each for each in NOT_SETTABLE if each not in elsewhere])
    case.extra_flags = [flag(name), "1"]
    return Promise(option=flag(name), found="cannot be set", change=NOT_SETTABLE[name])


@rule
def presets_with_a_typo(case: Case, rng: Random) -> Promise:
    wrong = rng.choice(["lama3_tiny", "llama3-tiny", "llama3_8B", "llama_8b", "gpt2"])
    case.extra_flags = ["--model", wrong]
    return Promise(option="preset", found=repr(wrong), change="--list-models names all of them")


@rule
def schedule_that_is_none(case: Case, rng: Random) -> Promise:
    alone(case)
    case["num_layers"], case["pipeline_model_parallel_size"], case.world = 4, 2, 2
    case["pipeline_schedule"] = rng.choice(["zb_h2", "zb_h1:0", "nowhere.csv", "hybrid:many"])
    return promise("pipeline_schedule", case["pipeline_schedule"])

"""Anything at all on the command line or in the file: a configuration or an error, never a crash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.config.types import SECTIONS, options
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate.environment import check_environment, environment_problems
from mt_megatron.training.validate import problems
from tests.second_lane import DAILY

SOAK = "MT_MEGATRON_SOAK" in os.environ
QUICK = settings(
    max_examples=2000 if SOAK else 80 if DAILY else 40,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=list(HealthCheck),
)

WORDS = st.one_of(
    st.sampled_from([option.flag for option in options().values()]),
    st.sampled_from(
        ["--config", "--model", "--no-bf16", "--", "-", "--=", "--no-", "llama3_tiny", "1", "none"]
    ),
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
)
VALUES: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def answered(argv: list[str], path: Path | None = None) -> None:
    """A configuration whose check ends with lines, or a ConfigError."""
    try:
        config = load_config(argv, path)
    except ConfigError as error:
        assert str(error).strip()
        return
    assert all(isinstance(line, str) for line in problems(config, world_size=2))


@QUICK
@given(st.lists(WORDS, max_size=6))
def test_any_words_are_answered(argv: list[str]) -> None:
    answered(argv)


@QUICK
@given(st.data())
def test_any_value_of_any_option_is_answered(data: st.DataObject) -> None:
    option = data.draw(st.sampled_from(list(options().values())))
    value = data.draw(st.one_of(st.integers(), st.floats(), st.text(max_size=5)))
    answered(["--model", "llama3_tiny", f"{option.flag}={value}"])


@QUICK
@given(data=st.data())
def test_any_yaml_is_answered(data: st.DataObject, tmp_path: Path) -> None:
    import yaml

    names = st.sampled_from(list(options())) | st.text(max_size=4)
    sections = st.sampled_from(list(SECTIONS)) | st.text(max_size=4)
    document = data.draw(
        st.dictionaries(sections, st.dictionaries(names, VALUES, max_size=3) | VALUES, max_size=3)
    )
    path = tmp_path / "any.yaml"
    path.write_text(yaml.dump(document), encoding="utf-8", errors="replace")
    answered([], path)


@QUICK
@given(
    content=st.binary(max_size=60)
    | st.text(alphabet=":-[]{}&*!|>'\"%@`# \n\tabc129.e~<", max_size=60).map(str.encode)
)
def test_any_bytes_in_the_file_are_answered(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    answered([], path)


FILES = {
    "not UTF-8": (b"model:\n  family: caf\xe9\n", "cannot be read"),
    "UTF-16": ("model:\n  num_layers: 2\n".encode("utf-16"), "cannot be read"),
    "a date that is none": (b"optimizer:\n  lr: 2024-13-45\n", "lr is '2024-13-45'; expected number"),
    "a bracket too few": (b"data:\n  data_path: [a, b\n", "is no valid YAML"),
    "a tab": (b"model:\n\tnum_layers: 2\n", "is no valid YAML"),
    "a Python object": (b"model:\n  family: !!python/object/apply:os.getcwd []\n", "is no valid YAML"),
    "two documents": (b"model:\n---\nmodel:\n", "is no valid YAML"),
    "a nest": (b"model: " + b"[" * 5000, "is no valid YAML"),
    "a number of five thousand digits": (b"train:\n  seed: " + b"9" * 5000 + b"\n", "is no valid YAML"),
    "a list": (b"- model\n- train\n", "expected sections such as"),
    "a word": (b"llama\n", "expected sections such as"),
    "a bomb": (
        b"a: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
        b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]\n",
        "there is no section 'a'",
    ),
    "a bomb for a value": (
        b"model:\n  <<: {num_layers: &a [x,x,x,x,x,x,x,x]}\n  hidden_size: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
        b"  seq_length: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n  vocab_size: &d [*c,*c,*c,*c,*c,*c,*c,*c]\n"
        b"  kv_channels: &e [*d,*d,*d,*d,*d,*d,*d,*d]\n  family: &f [*e,*e,*e,*e,*e,*e,*e,*e]\n"
        b"  normalization: [*f,*f,*f,*f,*f,*f,*f,*f]\n",
        "expected integer",
    ),
    "a true for a number": (b"train:\n  seq_length: true\n", "seq_length is True; expected integer"),
    "a yes for a text": (b"model:\n  family: yes\n", "family is True; expected text"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_configuration(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config([], path)
    assert expected in str(caught.value) and "run.yaml" in str(caught.value)
    assert len(str(caught.value)) < 20_000


@pytest.mark.parametrize("where", ["folder", "missing", "unreadable", "none"])
def test_a_file_that_cannot_be_read(where: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    if where == "folder":
        path.mkdir()
    if where == "unreadable":
        path.symlink_to("run.yaml")
    with pytest.raises(ConfigError, match="cannot be read|takes one value"):
        load_config(["--config"] if where == "none" else ["--config", str(path)])


def environment(**values: str) -> dict[str, str]:
    whole = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    whole |= values
    return {name: value for name, value in whole.items() if value != "-"}


def test_sound_environments() -> None:
    assert check_environment(environment()) == 4
    assert check_environment({}) == 1
    assert check_environment({"WORLD_SIZE": "1"}) == 1
    assert check_environment(environment(LOCAL_WORLD_SIZE="-", LOCAL_RANK="-")) == 4


@pytest.mark.parametrize(
    ("changed", "variable", "found"),
    [
        ({"WORLD_SIZE": "-"}, "RANK", "WORLD_SIZE is not set"),
        ({"RANK": "-"}, "WORLD_SIZE", "RANK is not set"),
        ({"RANK": "4"}, "RANK", "less than WORLD_SIZE = 4"),
        ({"RANK": "-1"}, "RANK", "'-1'"),
        ({"RANK": "one"}, "RANK", "'one'"),
        ({"RANK": ""}, "RANK", "''"),
        ({"RANK": "1.0"}, "RANK", "'1.0'"),
        ({"RANK": "²"}, "RANK", "'²'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE", "'0'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE", "'two'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK", "less than LOCAL_WORLD_SIZE = 2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK", "'x'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE", "'0'"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE", "at most WORLD_SIZE = 4"),
        ({"MASTER_ADDR": "-"}, "MASTER_ADDR", "not; expected them"),
        ({"MASTER_PORT": ""}, "MASTER_PORT", "not; expected them"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT", "'0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT", "'70000'"),
        ({"MASTER_PORT": "port"}, "MASTER_PORT", "'port'"),
    ],
)
def test_variables_that_contradict(changed: dict[str, str], variable: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(environment(**changed))
    text = str(caught.value)
    assert f"the variable {variable}" in text or variable in text
    assert found in text and "torchrun" in text


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@QUICK
@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-2, 9).map(str) | st.text(max_size=4)))
def test_any_environment_is_answered(found: dict[str, str]) -> None:
    lines = environment_problems(found)
    if not lines:
        assert int(found.get("RANK", "0")) < int(found.get("WORLD_SIZE", "1"))

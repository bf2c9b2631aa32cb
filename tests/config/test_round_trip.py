"""Whatever can be written as flags can be written as YAML, and what is printed reads back the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.config.types import PARSERS, Option, members, options

DAILY = os.environ.get("MT_MEGATRON_DAILY") == "1"

_TEXT = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=("C",)), min_size=1
).filter(lambda text: text.strip().lower() not in ("none", "null"))


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of one option's type, None included where it is allowed."""
    strategies: list[st.SearchStrategy[Any]] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            strategies.append(st.sampled_from(get_args(member)))
        elif get_origin(member) is tuple:
            inner = get_args(member)
            if inner[-1] is Ellipsis:
                strategies.append(st.lists(values_of(inner[0]), min_size=2, max_size=4).map(tuple))
            else:
                strategies.append(st.tuples(*(values_of(each) for each in inner)))
        else:
            strategies.append(
                {
                    bool: st.booleans(),
                    int: st.integers(-(2**40), 2**40),
                    float: st.floats(allow_nan=False, allow_infinity=False),
                    str: _TEXT,
                }[member]
            )
    if type(None) in get_args(annotation):
        strategies.append(st.none())
    return st.one_of(strategies)


_OPTIONS = [each for name, each in options().items() if name not in ("preset", "print_config")]


@st.composite
def settings_by_option(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(_OPTIONS), max_size=12, unique_by=lambda option: option.name))
    return {option.name: draw(values_of(option.type)) for option in chosen}


def as_flags(option: Option, value: Any) -> list[str]:
    if option.is_bool and value is not None:
        return [option.flag if value else f"--no-{option.flag[2:]}"]
    if isinstance(value, tuple):
        # Only the first of several values can be attached, and no later one may look like an option.
        return [option.flag + "=" + str(value[0]), *(str(each) for each in value[1:])]
    return [f"{option.flag}={'none' if value is None else value}"]


def flags_can_say(value: Any) -> bool:
    return not (isinstance(value, tuple) and any(str(each).startswith("--") for each in value[1:]))


@given(values=settings_by_option())
@settings(
    max_examples=300 if DAILY else 35,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_flags_yaml_and_the_printed_configuration_agree(tmp_path: Path, values: dict[str, Any]) -> None:
    values = {name: value for name, value in values.items() if flags_can_say(value)}
    known = options()
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        sections.setdefault(known[name].section, {})[name] = plain
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(sections, allow_unicode=True), encoding="utf-8")
    from_yaml = load_config([], path)
    from_flags = load_config(
        [word for name, value in values.items() for word in as_flags(known[name], value)]
    )
    assert from_flags == from_yaml
    path.write_text(from_yaml.to_yaml(), encoding="utf-8")
    assert load_config([], path) == from_yaml
    for name, value in values.items():
        read = from_yaml.to_dict()[known[name].section][name]
        if value is not None:
            # What looks like a list of numbers is one, where an option takes either.
            meant = PARSERS[name](value) if name in PARSERS else value
            assert read == (list(meant) if isinstance(meant, tuple) else meant)

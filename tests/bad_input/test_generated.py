"""One rule of a valid configuration is broken; the error names the option, its value and the way out."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_megatron.errors import ConfigError, DataError
from mt_megatron.training.validate import problems, validate
from tests.bad_input.cases import Case, Promise, loaded, valid_case
from tests.bad_input.rules import all_rules
from tests.second_lane import DAILY

RULES = all_rules()
SOAK = "MT_MEGATRON_SOAK" in os.environ
SEEDED = st.integers(0, 2**32 - 1).map(Random)
EXAMPLES = 100 if SOAK else 6 if DAILY else 3
SECONDS = 5.0
"""Of processor time, which does not depend on what else the machine does."""

_seen: set[tuple[str, str]] = set()


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=not SOAK,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def error_of(case: Case, folder: Path, rng: Random) -> str:
    """What a run of ``case`` ends with before it starts anything."""
    with pytest.raises((ConfigError, DataError)) as caught:
        validate(loaded(case, folder, rng), world_size=case.world)
    return str(caught.value)


def assert_kept(promise: Promise, text: str) -> None:
    """The error says which option, which value, and what to change, and is no crash."""
    assert promise.option in text, f"{promise.option!r} is not named in: {text}"
    assert promise.found in text, f"the value {promise.found!r} is not shown in: {text}"
    assert promise.change in text, f"the way out {promise.change!r} is not shown in: {text}"
    assert "Traceback" not in text and "AssertionError" not in text


@examples(1000 if SOAK else 40 if DAILY else 20)
@given(rng=SEEDED)
def test_what_is_drawn_as_valid_is_valid(rng: Random) -> None:
    case = valid_case(rng)
    with tempfile.TemporaryDirectory() as folder:
        assert problems(loaded(case, Path(folder), rng), world_size=case.world) == []


@pytest.mark.parametrize("name", RULES)
@examples(EXAMPLES)
@given(rng=SEEDED)
def test_a_broken_rule_is_named(name: str, rng: Random) -> None:
    case = valid_case(rng)
    promise = RULES[name](case, rng)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        text = error_of(case, Path(folder), rng)
        seconds = time.process_time() - began
    assert_kept(promise, text)
    assert seconds < SECONDS
    _seen.add((name, repr(case)))


def test_at_least_sixty_different_ones_were_tried() -> None:
    if len({name for name, *_ in _seen}) < len(RULES):
        pytest.skip("only a part of this file was run")
    assert len(_seen) >= 60 and len(RULES) >= 60

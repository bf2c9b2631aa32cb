"""Every way to break a valid configuration that the pre-flight promises to name, one function each.

A rule changes the drawn case in one place (and what else must change so that nothing besides is
wrong) and returns what the error has to say.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.bad_input.cases import Case, Promise

Rule = Callable[[Case, Random], Promise]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def promise(name: str, found: Any, change: str | None = None) -> Promise:
    return Promise(option=name, found=str(found), change=flag(name) if change is None else change)


def alone(case: Case) -> None:
    """One process, no division at all; a rule builds on it what it needs."""
    for name in (
        "virtual_pipeline_model_parallel_size",
        "sequence_parallel",
        "use_distributed_optimizer",
        "bf16",
    ):
        case.values.pop(name, None)
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        case[name] = 1
    case["global_batch_size"] = case["micro_batch_size"] * 4
    case.world = 1


def all_rules() -> dict[str, Rule]:
    """Every rule by name."""
    from tests.bad_input import (  # noqa: F401
        rules_contradictions,
        rules_division,
        rules_names,
        rules_places,
        rules_scan,
        rules_scope,
        rules_values,
    )

    return RULES

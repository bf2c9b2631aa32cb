"""What is said where weights meet a configuration that they were not made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mt_megatron.config.field_kinds import KINDS, Change, Kind, Values, changes, names_of
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import options, shown

OVERRIDE = "--allow-function-change"
_ORIGIN = ("tokenizer_model", "data_path", "train_data_path")
"""Further names for it: their contents are compared by digests, not their paths."""


def flat(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Option name -> value from ``TrainingConfig.to_dict()`` or what a checkpoint holds of it; names that
    are not known are left out."""
    known = options()
    return {
        name: value
        for values in sections.values()
        if isinstance(values, Mapping)
        for name, value in values.items()
        if name in known
    }


def refused(found: Sequence[Change], config: TrainingConfig, source: str) -> list[str]:
    """One line for each change of shape, and of the function unless ``config`` allows it. ``source`` is what
    has the earlier values, as in "the checkpoint"."""
    allowed = config.checkpoint.allow_function_change
    lines = []
    for change in found:
        text = f"{change.name} is {_shown(change.now)}; {source} has {_shown(change.before)}"
        if change.kind is Kind.SHAPE:
            lines.append(f"{text}, and weights of other shapes. {_advice(change)}")
        elif change.kind is Kind.FUNCTION and change.name not in allowed:
            lines.append(
                f"{text}: the weights would compute something else. {_advice(change)} If that is intended, "
                f"give {OVERRIDE} {change.name}."
            )
    return lines


def notes(found: Sequence[Change], config: TrainingConfig, source: str) -> list[str]:
    """What the log says: changes of the function that are allowed, and of what training does."""
    allowed = config.checkpoint.allow_function_change
    function = [each for each in found if each.kind is Kind.FUNCTION and each.name in allowed]
    objective = [each for each in found if each.kind is Kind.OBJECTIVE]
    lines = []
    if function:
        lines.append(
            f"WARNING: the model computes something else than that of {source}, as {OVERRIDE} allows: "
            f"{_listed(function)}"
        )
    if objective:
        lines.append(f"options of training that differ from those of {source}: {_listed(objective)}")
    return lines


def override_problems(config: TrainingConfig) -> list[str]:
    """One line for each name in ``allow_function_change`` that it is not about."""
    found = []
    for name in config.checkpoint.allow_function_change:
        kind = KINDS.get(name)
        if kind is Kind.FUNCTION or name in ("moe_router_load_balancing_type", *_ORIGIN):
            continue
        what = "no option" if kind is None else f"an option of the kind {kind.value}"
        found.append(
            f"allow_function_change names {name}, which is {what}; expected options that change what "
            f"the same weights compute, such as rotary_base. Leave it out of {OVERRIDE}."
        )
    return found


def changes_from(given: Values, config: TrainingConfig, *, ignored: tuple[str, ...] = ()) -> list[Change]:
    """The differences between a model that ``given`` options describe and ``config``.

    What ``given`` does not say of shape and function has its default there; of what training does, only
    what it says is compared.
    """
    now = flat(config.to_dict())
    unsaid = {name: now[name] for name in names_of(Kind.OBJECTIVE) if name not in given}
    return changes({**unsaid, **given}, now, ignored=ignored)


def _listed(found: Sequence[Change]) -> str:
    return ", ".join(f"{each.name} {_shown(each.before)} -> {_shown(each.now)}" for each in found)


def _shown(value: Any) -> str:
    return shown(list(value) if isinstance(value, tuple) else value).strip("'")


def _advice(change: Change) -> str:
    option = options()[change.name]
    before = change.before
    if isinstance(before, bool):
        return f"Set --{'' if before else 'no-'}{option.flag[2:]}."
    if before is None:
        return f"Leave {option.flag} out."
    return f"Set {option.flag} {' '.join(map(str, before)) if isinstance(before, list | tuple) else before}."

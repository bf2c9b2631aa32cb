"""FP8 state where Megatron-Core's own checkpoints have room for it: the extra state of a linear.

Scripts that save ``model.sharded_state_dict()`` or ``model.state_dict()`` and load it again keep scales,
histories, demotions and the step with it. Each layer's attention projection, which every layer has and
which is no expert's, holds the state of all linears of its layer; the last one also the output layer's.
Empty without FP8, so checkpoints with and without load both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mt_megatron.fp8.state import Fp8State, _nothing

if TYPE_CHECKING:
    from mt_megatron.fp8.linear import Fp8Linear

_log = logging.getLogger("mt_megatron")
_MARK = "mt_megatron_fp8"
_off = False
_said: set[str] = set()


@contextmanager
def without_extra_state() -> Iterator[None]:
    """Within it linears have no FP8 state: for checkpoints that keep it elsewhere."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def keep(module: Any, linears: list[Fp8Linear]) -> None:
    """Let ``module``, a ``RowParallelLinear``, hold the state of ``linears``, which are of one model."""
    names = dict.fromkeys(linear.name for linear in linears)
    module.fp8_names = [*getattr(module, "fp8_names", ()), *names]
    module.fp8_kept = _Kept(linears[0].state)


class _Kept:
    """An attribute of a module that holds the state of other modules' linears."""

    def __init__(self, state: Fp8State) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        # A stored module is loaded without us. A copied one has a configuration of its own, with the states
        # of the copy alone.
        return _nothing, ()


def extra_state(module: Any) -> dict[str, Any] | None:
    """Result of ``module.get_extra_state``: None without FP8."""
    found = None if _off else _state(module)
    if found is None:
        return None
    return {
        _MARK: 1,
        "recipe": _recipe(found),
        "step": found.step,
        "rows": {name: found.row(name) for name in module.fp8_names},
    }


def load_extra_state(module: Any, value: Any) -> None:
    """Put back what ``extra_state`` returned; of another recipe's magnitudes nothing, with a warning."""
    if _off or not isinstance(value, Mapping) or value.get(_MARK) != 1:
        return
    found = _state(module)
    if found is None:
        return
    saved, now = value["recipe"], _recipe(found)
    if saved != now and "delayed" in (saved[0], now[0]):
        _warn(f"the checkpoint's is of {_words(saved)}, this run's recipe is {_words(now)}")
        return
    found.step = int(value["step"])
    for name in module.fp8_names:
        if name in value["rows"]:
            found.load_row(name, value["rows"][name])
        else:
            _warn(f"the checkpoint has none of {name}")


def _state(module: Any) -> Fp8State | None:
    """Of the model that ``module`` is of."""
    names = getattr(module, "fp8_names", None)
    if not names:
        return None
    recipe = getattr(module.weight, "gemm_recipe", None)
    if recipe is not None:
        state: Fp8State = recipe.state
        return state
    # A projection that stays in bf16 and holds the output layer's.
    kept: _Kept | None = getattr(module, "fp8_kept", None)
    if kept is not None:
        return kept.state
    states = getattr(module.config, "fp8_states", None) or ()
    return next((each for each in states if isinstance(each, Fp8State) and names[0] in each.linears), None)


def _recipe(state: Fp8State) -> list[Any]:
    recipe = state.recipe
    return [recipe.name, recipe.history if recipe.scaling == "delayed" else 0]


def _words(recipe: list[Any]) -> str:
    name, history = recipe
    return f"{name} with fp8_amax_history_len {history}" if history else str(name)


def _warn(why: str) -> None:
    if why not in _said:
        _said.add(why)
        _log.warning("FP8 state starts anew: %s", why)

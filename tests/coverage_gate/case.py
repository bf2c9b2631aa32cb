"""What a named test of the gate is: a function, and the layout of ranks it runs under."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes a case asks for. ``world`` 0 means: no process group at all."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    cp: int = 1
    bare: bool = False
    """A process group, but no Megatron groups: the case makes them itself."""
    without: tuple[str, ...] = ()
    """Features left out of ``patch("cpu")``, so that upstream's own code runs in their place."""

    @property
    def launch(self) -> tuple[int, tuple[str, ...]]:
        """Cases that are equal in this share processes."""
        return max(self.world, 1), self.without

    def order(self) -> tuple[Any, ...]:
        """Cases sorted by this share one set of groups."""
        return (*self.launch, self.world, self.bare, self.tp, self.pp, self.vpp or 0, self.ep, self.cp)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One named test."""

    name: str
    """``<module>.<function>``, as pytest shows it."""
    layout: Layout
    run: Callable[[], None]


_CASES: dict[str, Case] = {}


def case(**layout: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function as a named test under ``Layout(**layout)``."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        if name in _CASES:
            raise ValueError(f"two cases are named {name}")
        _CASES[name] = Case(name=name, layout=Layout(**layout), run=function)
        return function

    return register


def all_cases() -> list[Case]:
    """Every case, those that share a layout together, in a fixed order."""
    import tests.coverage_gate.cases as package

    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    return sorted(_CASES.values(), key=lambda found: (found.layout.order(), found.name))

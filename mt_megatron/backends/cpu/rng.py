"""Random numbers of the CPU backend: a stream of the device's beside the host's, as on a GPU.

torch draws everything on the CPU from one generator. Outside of Megatron's device work that is the host's
stream. While a Megatron module computes, a fork of its RNG tracker is open or a backward pass runs, the
states are exchanged: ``torch.default_generator`` is the device's stream then, and the host's is kept here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_DRAWING = ("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "normal")


class DeviceGenerator(torch.Generator):
    """The device's generator, wherever its state is now. ``generator=`` takes it outside of device work."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        super().set_state(torch.default_generator.get_state())

    @property
    def is_in_use(self) -> bool:
        """Whether ``torch.default_generator`` is the device's stream now."""
        return self._depth > 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Draws on the CPU are the device's within this block; such blocks may nest."""
        self._depth += 1
        if self._depth == 1:
            self._exchange()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._exchange()

    def _exchange(self) -> None:
        here = super().get_state()
        super().set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(here)

    def get_state(self) -> torch.Tensor:
        """The device's state, a uint8 tensor."""
        return torch.default_generator.get_state() if self.is_in_use else super().get_state()

    def set_state(self, new_state: torch.Tensor) -> DeviceGenerator:
        """Make ``new_state`` the device's."""
        if self.is_in_use:
            torch.default_generator.set_state(new_state)
        else:
            super().set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> DeviceGenerator:
        """Seed the device's stream alone."""
        if self.is_in_use:
            torch.default_generator.manual_seed(seed)
        else:
            super().manual_seed(seed)
        return self

    def seed_all(self, seed: int) -> None:
        """Seed the device's stream and the host's, wherever each of them is now."""
        torch.default_generator.manual_seed(seed)
        super().manual_seed(seed)

    def seed(self) -> int:
        """Seed the device's stream by chance; returns the seed."""
        return int(torch.default_generator.seed() if self.is_in_use else super().seed())

    def initial_seed(self) -> int:
        """What the device's stream was seeded with."""
        return int(torch.default_generator.initial_seed() if self.is_in_use else super().initial_seed())

    def host_state(self) -> torch.Tensor:
        """The host's state, a uint8 tensor."""
        return super().get_state() if self.is_in_use else torch.default_generator.get_state()

    def set_host_state(self, new_state: torch.Tensor) -> None:
        """Make ``new_state`` the host's."""
        if self.is_in_use:
            super().set_state(new_state)
        else:
            torch.default_generator.set_state(new_state)


@functools.cache
def device_generator() -> DeviceGenerator:
    """This process's; it starts as the host's stream stands."""
    return DeviceGenerator()


def host_overrides(
    factories: Mapping[str, Callable[..., Any]], names: Callable[[Any], bool]
) -> dict[str, Any]:
    """What ``torch`` of Megatron's modules answers otherwise: the host's state is the host's within device
    work too, and a factory that is asked for a device (``names`` tells) draws from the device's stream."""
    device = device_generator()

    def on_device(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not any(names(each) for each in (*args, kwargs.get("device"))):
                return factory(*args, **kwargs)
            with device.in_use():
                return factory(*args, **kwargs)

        return drawn

    found: dict[str, Any] = {name: on_device(factories[name]) for name in _DRAWING if name in factories}
    found |= {"get_rng_state": device.host_state, "set_rng_state": device.set_host_state}
    return found

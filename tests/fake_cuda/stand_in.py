"""A recording stand-in for ``torch.cuda``: says that there are GPUs, notes every call, and has none.

Each name that it takes the place of must exist in the real module, and each call must fit the real
function's signature: the Python layer of ``torch.cuda`` is there on a CPU-only torch as well. It is
installed by tests alone; nothing in ``mt_megatron`` knows of it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a function of ``torch.cuda``, its arguments by the real parameter's name."""

    name: str
    arguments: dict[str, Any]


class Generator:
    """What ``torch.cuda.default_generators`` holds: a seed and a state, both only remembered."""

    def __init__(self, recorder: RecordingCuda, index: int) -> None:
        self._recorder, self.index, self.seed = recorder, index, 0
        self.state: Any = None

    def get_state(self) -> Any:
        # Of whatever mode is current: a fake tensor inside FakeTensorMode.
        return torch.zeros(16, dtype=torch.uint8) if self.state is None else self.state

    def set_state(self, state: torch.Tensor) -> None:
        self._recorder.calls.append(
            Call(name="default_generators.set_state", arguments={"index": self.index})
        )
        if state.device.type != "cpu":
            raise TypeError(f"RNG state must be on the host, found it on {state.device}")
        self.state = state


class Stream:
    """A queue that is always empty."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = device

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    """A mark in such a queue; no time passes between two of them."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return 0.0


@dataclass(kw_only=True)
class RecordingCuda:
    """``with RecordingCuda(...).installed() as cuda:`` and then look at ``cuda.calls``."""

    devices: int = 8
    current: int = 0
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory: int = 80 * GIB
    available: bool = True
    calls: list[Call] = field(default_factory=list)

    def names(self) -> list[str]:
        """What was called, in order."""
        return [call.name for call in self.calls]

    def behaviour(self) -> dict[str, Any]:
        """Name below ``torch.cuda`` -> what answers there."""
        stream = Stream()
        self._generators = tuple(Generator(self, index) for index in range(self.devices))

        def generator() -> Generator:
            return self._generators[self.current]

        def set_device(device: Any) -> None:
            self.current = self.index(device)

        def exchange(device: int) -> int:
            before = self.current
            if device >= 0:
                self.current = device
            return before

        def manual_seed(seed: int) -> None:
            generator().seed = int(seed)

        return {
            "is_available": lambda: self.available and self.devices > 0,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "device_count": lambda: self.devices if self.available else 0,
            "current_device": lambda: self.current,
            "set_device": set_device,
            "get_device_name": lambda device=None: self.name,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: self._properties(),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "manual_seed": manual_seed,
            "manual_seed_all": manual_seed,
            "get_rng_state": lambda device="cuda": generator().get_state(),
            "set_rng_state": lambda new_state, device="cuda": generator().set_state(new_state),
            "memory_allocated": lambda device=None: 3 * GIB,
            "memory_stats_as_nested_dict": lambda device=None: {
                "allocated_bytes": {"all": {"current": 3 * GIB}}
            },
            "max_memory_allocated": lambda device=None: 5 * GIB,
            "memory_reserved": lambda device=None: 6 * GIB,
            "memory_stats": lambda device=None: {"allocated_bytes.all.current": 3 * GIB},
            "reset_peak_memory_stats": lambda device=None: None,
            "mem_get_info": lambda device=None: (self.memory // 2, self.memory),
            "is_bf16_supported": lambda including_emulation=True: self.capability >= (8, 0),
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "set_stream": lambda stream: None,
            "stream": lambda stream: contextlib.nullcontext(),
            "utilization": lambda device=None: 42,
            "temperature": lambda device=None: 61,
            "power_draw": lambda device=None: 350_000,
            "clock_rate": lambda device=None: 1980,
            "_exchange_device": exchange,
            "_maybe_exchange_device": exchange,
            "_lazy_init": lambda: None,
        }

    @contextlib.contextmanager
    def installed(self) -> Iterator[RecordingCuda]:
        """Stand in for ``torch.cuda`` until the block ends."""
        values: dict[tuple[Any, str], Any] = {
            (torch.cuda, name): self._recorded(name, body) for name, body in self.behaviour().items()
        }
        values[torch.cuda, "Stream"], values[torch.cuda, "Event"] = Stream, Event
        values[torch.cuda, "default_generators"] = self._generators
        values[torch.backends.cuda, "is_built"] = lambda: True
        before = {place: getattr(*place) for place in values}
        try:
            for (owner, name), value in values.items():
                setattr(owner, name, value)
            yield self
        finally:
            for (owner, name), value in before.items():
                setattr(owner, name, value)

    def _recorded(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        real = getattr(torch.cuda, name)  # An AttributeError here means: torch.cuda has no such name.
        try:
            signature = inspect.signature(real)
        except ValueError:
            # A build with CUDA has C functions, which tell nothing of their arguments.
            signature = inspect.Signature.from_callable(body)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            self.calls.append(Call(name=name, arguments=dict(bound.arguments)))
            return body(*args, **kwargs)

        return call

    def index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current if index is None else index

    def _properties(self) -> SimpleNamespace:
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name, total_memory=self.memory, major=major, minor=minor, multi_processor_count=132
        )


def local_index(rank: int, devices: int = 8) -> int:
    """The device of ``rank`` where every node has ``devices`` of them, as torchrun would number them."""
    return rank % devices


def torchrun_environment(rank: int, world: int, devices: int = 8) -> dict[str, str]:
    """The variables that torchrun sets, over those of this process."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_index(rank, devices)),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(min(world, devices)),
    }

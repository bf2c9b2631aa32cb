"""Which backends exist and which one to use: built in, or brought by an entry point."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ..errors import BackendError

if TYPE_CHECKING:
    from .base import Backend

GROUP = "mt_megatron.backends"

# Also declared as entry points by this package; named here too so that a source tree on the path,
# which has no installed metadata, still has its own backends.
_BUILT_IN = {
    "cpu": "mt_megatron.backends.cpu:CpuBackend",
    "cuda": "mt_megatron.backends.cuda:CudaBackend",
    "musa": "mt_megatron.backends.musa:MusaBackend",
}

_instances: dict[str, Backend] = {}


def _load(reference: str) -> Callable[[], Backend]:
    module_name, _, attribute = reference.partition(":")
    module = __import__(module_name, fromlist=[attribute])
    factory: Callable[[], Backend] = getattr(module, attribute)
    return factory


def _references() -> dict[str, str]:
    found = dict(_BUILT_IN)
    for point in entry_points(group=GROUP):
        if point.name in _BUILT_IN and point.value != _BUILT_IN[point.name]:
            raise BackendError(
                f"the entry point {GROUP}:{point.name} points to {point.value}, but that name belongs to "
                f"{_BUILT_IN[point.name]}; rename the backend in the package that declares it"
            )
        found[point.name] = point.value
    return found


def names() -> list[str]:
    """Names of all backends that are installed, whether or not their device is here."""
    return sorted(_references())


def check_name(name: str) -> None:
    """Raise ``BackendError`` unless ``name`` is ``auto`` or an installed backend; imports no backend."""
    known = names()
    if name == "auto" or name in known:
        return
    # With another first letter it is another device (tpu, gpu), not a slip.
    near = difflib.get_close_matches(name, [each for each in known if each[:1] == name[:1]], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise BackendError(f"no backend is called {name!r}; installed are {', '.join(known)}{hint}")


def get(name: str) -> Backend:
    """The backend object called ``name``, made once per process.

    Raises:
        BackendError: no such backend, or the installed one is not a ``Backend``.
    """
    if name in _instances:
        return _instances[name]
    references = _references()
    if name not in references:
        check_name(name)
    from .base import Backend  # here, since the names can be asked for without importing torch

    backend = _load(references[name])()
    if not isinstance(backend, Backend):
        raise BackendError(f"{references[name]} does not implement the mt_megatron Backend protocol")
    return _instances.setdefault(name, backend)


def select(name: str = "auto") -> tuple[Backend, str]:
    """The backend to use and the reason, one line.

    ``auto`` takes the first accelerator that is available, in the order of their names, and
    ``cpu`` where there is none. A name given explicitly is an order: when its device is missing,
    that is an error and never a silent change to another.

    Raises:
        BackendError: unknown name, or a named backend that cannot be used here.
    """
    if not isinstance(name, str):
        raise BackendError(
            f"backend={name!r} is a {type(name).__name__}: expected a name, auto or one of "
            f"{', '.join(names())}"
        )
    if name != "auto":
        backend = get(name)
        usable, why = backend.available()
        if not usable:
            raise BackendError(
                f"backend {name!r} was asked for but cannot be used here: {why}. "
                "Use backend='cpu', or 'auto' for what this machine has"
            )
        return backend, f"{name} was asked for: {why}"
    reasons: list[str] = []
    for candidate in (n for n in names() if n != "cpu"):
        backend = get(candidate)
        usable, why = backend.available()
        if usable:
            return backend, f"auto: {why}"
        reasons.append(f"{candidate}: {why}")
    return get("cpu"), "auto: no accelerator (" + "; ".join(reasons) + ")"

"""Module-like views: ``torch`` with some names answered differently, ``torch.cuda`` made of ours."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BackendError


class UnsupportedDeviceCall(BackendError, AttributeError):
    """Code asked the ``torch.cuda`` view for a name that the active backend does not have."""


class DeviceNamespace(types.ModuleType):
    """What redirected code sees as ``torch.cuda``: the given members, and nothing of CUDA itself.

    Falling through to the real ``torch.cuda`` would answer for another device without a word, so
    an unknown name is an ``AttributeError`` (``hasattr`` works) that says which backend lacks it.
    ``computed`` members are called for at every access: the vendor's module has them later, or others.
    """

    def __init__(
        self,
        name: str,
        backend_name: str,
        members: Mapping[str, Any],
        computed: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        super().__init__(name, f"{name} as the {backend_name} backend answers it")
        self.__dict__.update(members)
        self.__dict__["_backend_name"] = backend_name
        self.__dict__["_computed"] = dict(computed or {})

    def __getattr__(self, name: str) -> Any:
        computed = self.__dict__.get("_computed", {})
        if name in computed:
            return computed[name]()
        backend = self.__dict__.get("_backend_name", "active")
        raise UnsupportedDeviceCall(f"the {backend} backend has no {self.__name__}.{name}")


class ModuleView(types.ModuleType):
    """A live view of ``real`` in which the names in ``overrides`` have other values.

    Everything else, reading and writing, goes to the real module at the moment of access, so
    the view is never stale. Dotted names make nested views: ``{"cuda.amp": x}``.
    """

    def __init__(self, real: types.ModuleType, overrides: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        own = self.__dict__
        for dunder in ("__name__", "__package__", "__spec__", "__path__", "__file__", "__loader__"):
            if hasattr(real, dunder):
                own[dunder] = getattr(real, dunder)
        nested: dict[str, dict[str, Any]] = {}
        for name, value in overrides.items():
            head, dot, rest = name.partition(".")
            if dot:
                nested.setdefault(head, {})[rest] = value
            else:
                own[head] = value
        for head, below in nested.items():
            inner = own.get(head)
            if isinstance(inner, types.ModuleType):
                for name, value in below.items():
                    setattr(inner, name, value)
            else:
                own[head] = ModuleView(getattr(real, head), below)
        own["_real_module"] = real
        own["_overridden"] = frozenset(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__["_overridden"]:
            self.__dict__[name] = value
        else:
            setattr(self.__dict__["_real_module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_real_module"], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__dict__["_real_module"]), *self.__dict__})

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled reference to the view is a reference to the module it stands for.
        return (__import__, (self.__dict__["_real_module"].__name__, None, None, ["_"]))

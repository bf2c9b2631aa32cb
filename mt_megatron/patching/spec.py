"""What a patch is: a frozen record that names a target, a kind, a reason and a body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["wrap", "replace", "add", "value", "constant", "rebind", "fields", "module"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One declared change to one target. Declaring it does nothing; a plan applies it."""

    id: str
    """Unique, ``<concern>.<name>``, as shown by ``mt-megatron patches list``."""

    target: str
    """``module:qualname``, for example ``a.b.c:Class.method``. ``module:`` (nothing after the
    colon) names the module object itself and is only allowed for ``rebind`` and ``module``."""

    kind: Kind
    """
    * ``wrap``: ``body(original, *args, **kwargs)`` is called instead of the target, a function.
      Of a staticmethod, classmethod or property, ``original`` is the function inside.
    * ``replace``: ``body`` (a function with the target's signature, or a class) takes the
      target's place. A function is copied under the target's name; a class has to carry the
      target's ``__module__`` and ``__qualname__`` itself, so that pickle finds its instances.
    * ``add``: ``body`` is put at a target that must not exist (for a class attribute: must not
      be in the class's own ``__dict__``).
    * ``value``: ``body(original)`` returns the value to put at the target, a raw descriptor where
      ``original`` is one.
    * ``constant``: ``body`` maps literals to literals; they are swapped in the target
      function's code object (nested code included, default arguments not). A literal that does
      not occur is an error; ``1``, ``True`` and ``1.0`` are different literals.
    * ``rebind``: the target keeps its value for everybody else, and every name bound to that
      very object in the modules of ``scope``, imported now or later, is bound to
      ``body(original)``: names of the modules and their classes, and default arguments.
    * ``fields``: ``body`` is a tuple of keyword-only ``dataclasses.Field``, which the target, a
      dataclass, and every subclass of it accept beside their own.
    * ``module``: the target cannot be imported, since its source wants a package that is absent
      (see ``unless``). ``body(module)`` fills an empty module in its place; modules that tried to
      import names of it before, and went on without, get them (see ``patching.served``).
    """

    reason: str
    """One line: why the change is needed."""

    body: Any
    """See ``kind``."""

    feature: str = "core"
    """What ``patch(features=...)`` selects by."""

    backends: frozenset[str] | None = None
    """Names of the backends it applies to; ``None`` means all."""

    requires: Mapping[str, str] = field(default_factory=dict)
    """Distribution name -> PEP 440 specifier. Outside it the patch is left out and the report
    says so: a compatibility patch belongs to a version range, not to a device."""

    unless: tuple[str, ...] = ()
    """Top-level modules; where one of them can be imported the patch is left out."""

    digest: str | None = None
    """sha256 of the upstream source it was written against (see ``patching.digest``). Required
    for ``wrap``, ``replace`` and ``constant``, except of packages in ``Settings.unpinned``;
    ``value``, ``add`` and ``rebind`` may omit it."""

    after: tuple[str, ...] = ()
    """Ids of patches that must be applied before this one, when they are selected."""

    optional: bool = False
    """Whether the target's module may be missing, or be found only after a script has changed
    ``sys.path``. The patch waits then, and is checked when the module is imported."""

    dispensable: bool = False
    """Whether a target of another source leaves the patch out, with a warning, instead of being an error:
    for a function that people edit, where the rest works without the patch."""

    scope: tuple[str, ...] = ()
    """``rebind`` only: dotted module-name prefixes (``"megatron"`` covers ``megatron.core.x``)."""

    @property
    def module(self) -> str:
        """The module of the target."""
        return self.target.partition(":")[0]

"""What is patched in this process: the public functions, and all that ties the engine to Megatron."""

from __future__ import annotations

import ast
import atexit
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends.current import provide
from .errors import PatchError, PatchTargetError, UpstreamVersionError
from .patching.in_force import choose

if TYPE_CHECKING:
    from .backends.base import Backend
    from .patching.engine import AppliedPlan
    from .patching.plan import Plan, Settings
    from .patching.report import PatchReport
    from .patching.scope import Scope

MEGATRON_CORE = "0.9.0"
"""The one upstream version that the patches are written against."""

TESTED = {"torch": ">=2.13,<2.14 || ==2.7.1", "numpy": ">=1.26,<2.5"}
"""Alternatives are joined by ``||``. Outside of these versions everything may still work; ``patch()``
and ``doctor`` say so."""

ALLOW_DRIFT = "MT_MEGATRON_ALLOW_DRIFT"
"""Environment variable; ``1`` turns UpstreamDriftError into a warning that the report records."""

FINGERPRINTS = Path(__file__).parent / "patches" / "upstream.json.gz"

_HIDDEN = ("ignore", None, FutureWarning, re.compile(r"megatron\."), 0)
"""Deprecations in upstream's source, which its users cannot change; a filter of the user's comes before."""

_log = logging.getLogger("mt_megatron")
_changing = threading.RLock()
_applied: AppliedPlan | None = None
_backend: Backend | None = None
_request: _Request | None = None


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What ``patch()`` was asked for, by which a second call is told from another wish."""

    backend: str
    features: frozenset[str] | None
    strict: bool
    scope: Scope

    def __str__(self) -> str:
        which = "all features" if self.features is None else f"features {', '.join(sorted(self.features))}"
        beside = f", scope {self.scope}" if self.scope else ""
        return f"backend {self.backend!r}, {which}, strict={self.strict}{beside}"

    def grants(self, other: _Request) -> bool:
        """Whether ``other`` asks for nothing else; who names no scope is content with any."""
        return replace(other, scope=other.scope or self.scope) == self


def patch(
    backend: str = "auto",
    *,
    features: Iterable[str] | None = None,
    strict: bool = True,
    scope: Iterable[str | Path] = (),
) -> PatchReport:
    """Make Megatron-Core use ``backend``. All or nothing, reversible with ``unpatch()``.

    What is imported already is patched now and rebound in every holder; modules imported later
    are patched when they are. The same call again changes nothing and returns the report. Over
    Gloo, process groups that are left when the process exits are ended then (its feature is
    ``collectives``).

    Args:
        backend: ``cpu``, ``cuda``, ``musa`` or another installed one; ``auto`` takes the
            accelerator that is there, else ``cpu``.
        features: which kinds of change, by the ``feature`` of ``mt-megatron patches list``;
            None means all.
        strict: whether a holder of a patched object that cannot be rebound is an error, and a
            target that other code changed before in a way that loses the patch or the change.
            Without it the report lists both.
        scope: whose code sees the backend as its ``torch.cuda`` beside Megatron's: module names
            (``"mytrainer"`` with all below it, ``"__main__"``) and folders (docs/09).

    Raises:
        UpstreamVersionError: megatron-core is missing or is not 0.9.0.
        UpstreamDriftError: the source of a target is not the expected one.
        BackendError: the backend is unknown or cannot be used here.
        PatchError: anything else in the way, such as another plan that is still in force.
    """
    global _applied, _backend, _request
    from mt_megatron.patches.device.process_groups import end_groups
    from mt_megatron.patches.device.scope import redirect

    from .backends.registry import select
    from .patching.engine import commit
    from .patching.scope import Scope

    if isinstance(features, str):
        raise PatchError(f"features={features!r} is one string: expected a list of names, [{features!r}]")
    if features is not None and not isinstance(features, Iterable):
        kind = type(features).__name__
        raise PatchError(f"features={features!r} is one {kind}: expected a list of names, or None for all")
    wanted = None if features is None else frozenset(features)
    request = _Request(backend=backend, features=wanted, strict=strict, scope=Scope.of(scope))
    with _changing:
        if _applied is not None and _applied.active and _request is not None:
            # Before anything is selected: it must be the same error where the other is not usable.
            asked = replace(request, backend=select(backend)[0].name) if backend == "auto" else request
            if _request.grants(asked):
                return _applied.report()
            raise PatchError(
                f"patch() is in force with {_request}, and now {asked} was asked for: "
                f"call mt_megatron.unpatch() first"
            )
        chosen, why = select(backend)
        plan = make_plan_for(chosen, why, features=wanted, strict=strict)
        # First, since methods decide by their caller from the moment they are patched.
        redirect(request.scope)
        applied = commit(plan, request.scope)
        choose(wanted)
        warnings.filters.append(_HIDDEN)  # type: ignore[attr-defined]
        _applied, _backend, _request = applied, chosen, replace(request, backend=chosen.name)
        if chosen.collective == "gloo" and (wanted is None or "collectives" in wanted):
            atexit.register(end_groups)
    found = applied.report()
    if os.environ.get("RANK", "0") == "0":
        _log.info("%s", found.summary())
        for warning in found.warnings:
            _log.warning("%s", warning)
    return found


def unpatch() -> None:
    """Undo ``patch()``: afterwards every attribute is the very object it was before. Without a
    plan in force nothing happens.

    Raises PatchError, and changes nothing, when somebody else has patched over one of our values.
    """
    global _applied, _backend, _request
    with _changing:
        kept = _applied.revert() if _applied is not None else []
        if "mt_megatron.seams.transport" in sys.modules:
            from mt_megatron.seams import transport

            transport.close()
        _applied = _backend = _request = None
        choose(None)
        if _HIDDEN in warnings.filters:
            warnings.filters.remove(_HIDDEN)  # type: ignore[attr-defined]
        if "mt_megatron.patches.device.process_groups" in sys.modules:
            from mt_megatron.patches.device.process_groups import end_groups

            atexit.unregister(end_groups)
        if "mt_megatron.patches.device.scope" in sys.modules:
            from mt_megatron.patches.device.scope import redirect

            from .patching.scope import Scope

            redirect(Scope())
    for holder in kept:
        _log.warning("unpatch(): %s got a patched value after patch() and keeps it", holder)


@contextmanager
def patched(
    backend: str = "auto",
    *,
    features: Iterable[str] | None = None,
    strict: bool = True,
    scope: Iterable[str | Path] = (),
) -> Iterator[PatchReport]:
    """``patch()`` on entry and ``unpatch()`` on exit. Raises PatchError where a plan is already in
    force, since leaving the block would undo it."""
    with _changing:
        if _applied is not None and _applied.active:
            raise PatchError("patched() undoes its patches at its end, but patch() is already in force")
        found = patch(backend, features=features, strict=strict, scope=scope)
    try:
        yield found
    finally:
        unpatch()


def report() -> PatchReport:
    """What is applied and what waits for its module, now. Raises PatchError without ``patch()``."""
    return _in_force().report()


def backend() -> Backend:
    """The backend in force. Raises PatchError without ``patch()``."""
    _in_force()
    assert _backend is not None
    return _backend


provide(backend)


def compare_plan_across_ranks(group: Any = None) -> None:
    """Raise PatchError, on every rank of the process group ``group``, unless all ranks apply the
    same patches to the same upstream sources. A collective call of 32 bytes per rank."""
    import torch
    import torch.distributed as dist

    mine = report().plan_digest
    chosen = backend()
    on_host = dist.get_backend(group) == "gloo"
    device = torch.device("cpu") if on_host else chosen.device(chosen.current_device())
    own = torch.tensor(list(bytes.fromhex(mine)), dtype=torch.uint8, device=device)
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    digests = [bytes(one.tolist()).hex() for one in all_ranks]
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"plan {digest[:12]} on rank(s) {which}" for digest, which in ranks.items())
        raise PatchError(
            f"the ranks do not apply the same patches ({found}): give all of them the same backend, "
            f"features, torch, numpy and megatron-core; 'mt-megatron patches check --json' shows what differs"
        )


def make_plan_for(
    chosen: Backend, why: str, *, features: Iterable[str] | None = None, strict: bool = True
) -> Plan:
    """Check versions and sources and plan the patches of a backend, changing nothing."""
    from .patches import collect, reading_fields
    from .patching.plan import make_plan

    check_upstream_version()
    wanted = None if features is None else frozenset(features)
    if wanted is not None and "model_config" not in wanted and (readers := reading_fields(wanted)):
        raise PatchError(
            f"features {', '.join(readers)} read fields of the configuration that the feature model_config "
            "adds; add it to the features"
        )
    return make_plan(
        collect(chosen),
        backend=chosen.name,
        why=why,
        features=wanted,
        strict=strict,
        settings=settings(),
        notes=untested_versions(),
    )


def settings() -> Settings:
    """The engine's settings in this environment."""
    from mt_megatron.patching.digest import default_path

    from .patching.plan import Settings

    return Settings(
        allow_drift=os.environ.get(ALLOW_DRIFT) == "1",
        fingerprints=FINGERPRINTS,
        cache=default_path(),
        unpinned=tuple(TESTED),
    )


def check_upstream_version() -> None:
    """Raise UpstreamVersionError unless megatron-core is the supported one.

    The version that the source itself states counts: a tree on ``sys.path`` comes before the
    installed distribution and has no metadata."""
    from .patching.plan import installed_version

    found, where = _source_version()
    if found is None:
        found, where = installed_version("megatron-core"), "its metadata"
    if found != MEGATRON_CORE:
        what = "is not installed" if found is None else f"is {found} ({where})"
        raise UpstreamVersionError(
            f"megatron-core {what}, but this version of mt_megatron patches {MEGATRON_CORE}: "
            f"run 'pip install megatron-core=={MEGATRON_CORE}'"
            + ("" if found is None else ", and take another megatron tree off PYTHONPATH if there is one")
        )


def _source_version() -> tuple[str | None, str]:
    from .patching.source import locate

    try:
        path = locate("megatron.core.package_info")
    except PatchTargetError:
        return None, ""
    values: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values.update((name.id, node.value.value) for name in node.targets if isinstance(name, ast.Name))
    parts = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if None in parts:
        return None, ""
    return ".".join(map(str, parts)) + str(values.get("PRE_RELEASE", "")), str(path)


def untested_versions() -> tuple[str, ...]:
    """A sentence for each dependency whose version is outside of what was tested."""
    from .patching.plan import installed_version, within

    found: list[str] = []
    for name, tested in TESTED.items():
        version = installed_version(name)
        if version is not None and not any(within(version, one) for one in tested.split("||")):
            found.append(f"{name} {version} is outside of the tested versions ({tested})")
    return tuple(found)


def _in_force() -> AppliedPlan:
    if _applied is None:
        raise PatchError("nothing is patched: call mt_megatron.patch() first")
    if _applied.failure is not None:
        raise PatchError(f"nothing is patched any more, a late patch failed: {_applied.failure}")
    return _applied

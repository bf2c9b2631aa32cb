"""Check one patch against the installed source of its target, importing nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import PatchError, PatchTargetError, UpstreamDriftError
from .cache import DigestCache
from .dataclass_fields import check_fields
from .digest import Source, source_of
from .drift import describe_drift, read_fingerprints
from .rebind import in_package
from .signatures import misfit
from .source import exists, parse_target
from .spec import Patch

_DIGESTED = ("wrap", "replace", "constant")


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What was found for one patch; problems are kept, to be raised in the order of the plan."""

    patch: Patch
    source: Source | None = None
    problem: PatchError | None = None

    @property
    def digest(self) -> str | None:
        return None if self.source is None else self.source.digest

    @property
    def drifted(self) -> bool:
        return self.source is not None and self.patch.digest not in (None, self.source.digest)

    def obstacle(self, fingerprints: Path | None, *, allow_drift: bool) -> PatchError | None:
        """What stands in the way: drift before anything else, which it mostly explains."""
        if self.drifted and not allow_drift:
            return UpstreamDriftError(self.drift_warning(fingerprints))
        return self.problem

    def drift_warning(self, fingerprints: Path | None) -> str:
        """Patch, file and lines of the drift."""
        assert self.source is not None and self.patch.digest is not None
        recorded = {} if fingerprints is None else read_fingerprints(fingerprints)
        found = describe_drift(self.source, self.patch.digest, recorded)
        return (
            f"patch {self.patch.id}: the installed source of {self.patch.target} is not the one it was "
            f"written against (expected digest {self.patch.digest[:12]}, found "
            f"{self.source.digest[:12]})\n  {found}\n  Install the supported version, or check the patch "
            f"against this source."
        )


def resolve(patch: Patch, cache: DigestCache, unpinned: Sequence[str]) -> Resolution:
    """Everything about ``patch`` that can be known without importing its target."""
    try:
        _check_record(patch)
        source = _source(patch, cache, unpinned)
        problem = None if source is None else _misfit(patch, source)
        return Resolution(patch=patch, source=source, problem=problem)
    except PatchTargetError as error:
        return Resolution(patch=patch, problem=PatchTargetError(f"patch {patch.id}: {error}"))


def _check_record(patch: Patch) -> None:
    _, qualname = parse_target(patch.target)
    if not qualname and patch.kind != "rebind":
        raise PatchTargetError(f"{patch.target!r} is a whole module, which only a rebind can target")
    if (patch.kind == "rebind") != bool(patch.scope):
        raise PatchTargetError("scope belongs to a rebind, and a rebind needs one")
    if patch.kind == "constant":
        if not isinstance(patch.body, Mapping) or not patch.body:
            raise PatchTargetError("the body of a constant maps literals to literals, and is not empty")
    elif patch.kind == "fields":
        check_fields(patch.body)
    elif patch.kind != "add" and not callable(patch.body):
        raise PatchTargetError(f"the body of a {patch.kind} is called, but it is {patch.body!r}")


def _source(patch: Patch, cache: DigestCache, unpinned: Sequence[str]) -> Source | None:
    module, qualname = parse_target(patch.target)
    free = any(in_package(module, package) for package in unpinned)
    if patch.kind == "rebind":
        if patch.digest is None:
            if not exists(module):
                raise PatchTargetError(f"no module {module!r}: is it installed here?")
            return None
        return source_of(patch.target, cache)
    if patch.kind == "add":
        _check_addition(patch, module, qualname, cache)
        return None
    try:
        source = source_of(patch.target, cache)
    except PatchTargetError:
        # Written in C, inherited, or imported there: only the running program can tell, and the
        # commit looks first.
        if free and patch.digest is None and exists(module):
            return None
        raise
    if patch.kind in _DIGESTED and not patch.digest and not (free and patch.digest is None):
        raise PatchTargetError(
            f"a {patch.kind} states the digest of the source that it was written against; the installed "
            f"one is {source.digest}"
        )
    return source


def _check_addition(patch: Patch, module: str, qualname: str, cache: DigestCache) -> None:
    try:
        found = source_of(patch.target, cache)
    except PatchTargetError:
        outer = qualname.rpartition(".")[0]
        if outer:
            owner = source_of(f"{module}:{outer}", cache)
            if owner.definition.kind != "class":
                raise PatchTargetError(
                    f"{module}:{outer} is no class, so nothing can be added to it"
                ) from None
        elif not exists(module):
            raise
        return
    raise PatchTargetError(
        f"{patch.target} is already defined, in {found.path}:{found.first_line}; "
        f"an add needs a name that is free"
    )


def _misfit(patch: Patch, source: Source) -> PatchTargetError | None:
    """Why the body cannot stand in for the target, or None."""
    definition = source.definition

    def problem(text: str) -> PatchTargetError:
        return PatchTargetError(f"patch {patch.id}: {text} ({source.path}:{source.first_line})")

    if definition.kind == "import" and patch.kind in _DIGESTED:
        return problem(
            f"{patch.target} is only imported there, from {definition.imported_from}; patch the place that "
            f"defines it, or rebind the name"
        )
    if patch.kind == "wrap" and definition.kind == "class":
        return problem(f"{patch.target} is a class; wrap its methods, such as {patch.target}.__init__")
    if patch.kind == "constant" and definition.kind != "function":
        return problem(f"{patch.target} is no function, so it has no literals that could be exchanged")
    if patch.kind == "fields" and definition.kind != "class":
        return problem(f"{patch.target} is no class, so it has no fields")
    if patch.kind == "replace":
        if isinstance(patch.body, type) != (definition.kind == "class"):
            return problem(f"the body is a {type(patch.body).__name__}, the target a {definition.kind}")
        names = (patch.body.__module__, patch.body.__qualname__) if isinstance(patch.body, type) else None
        if names is not None and ":".join(names) != patch.target:
            return problem(
                f"pickle would look for the class as {names[0]}:{names[1]}; give it the target's "
                f"__module__ and __qualname__"
            )
    if patch.kind in ("wrap", "replace") and definition.parameters is not None:
        text = misfit(patch.body, definition.parameters, skip_original=patch.kind == "wrap")
        return None if text is None else problem(text)
    return None

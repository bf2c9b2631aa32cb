"""Decide what to apply and in which order, and prove from source files that it can be applied."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from mt_megatron.errors import PatchConflictError, PatchError, PatchTargetError, UpstreamDriftError
from mt_megatron.patching.dataclass_fields import check_fields
from mt_megatron.patching.digest import (
    SCHEME,
    DigestCache,
    Source,
    describe_drift,
    read_fingerprints,
    source_of,
)
from mt_megatron.patching.rebind import in_package
from mt_megatron.patching.source import Parameter, exists, parse_target
from mt_megatron.patching.spec import Patch

# Signatures: whether every call that fits the upstream signature also fits the body that takes its place.

_Call = tuple[list[str], dict[str, str]]
_RECEIVERS = ("self", "cls", "ctx", "mcs")


def misfit(body: Any, upstream: Sequence[Parameter], *, skip_original: bool) -> str | None:
    """What is wrong with ``body``, or None. ``skip_original``: it is the body of a wrap, which
    takes the original first. Only plain functions are looked at."""
    if isinstance(body, (staticmethod, classmethod)):
        body = body.__func__
    if type(body) is not FunctionType or _takes_the_same(body, upstream, first=int(skip_original)):
        return None
    signature = inspect.signature(body, follow_wrapped=False)
    original = ["original"] if skip_original else []
    for positional, named in _calls(upstream):
        shown = ", ".join([*positional, *(f"{name}=" for name in named)])
        try:
            bound = signature.bind(*original, *positional, **named)
        except TypeError as error:
            return f"the call ({shown}) fits upstream but not the body: {error}"
        expected = {parameter.name for parameter in upstream}
        for name, value in bound.arguments.items():
            if name in expected and isinstance(value, str) and value in expected and name != value:
                return f"the call ({shown}) gives upstream's {value!r} to the body's {name!r}"
    return None


def _takes_the_same(body: FunctionType, upstream: Sequence[Parameter], *, first: int) -> bool:
    """Whether the parameters of ``body`` from ``first`` on are upstream's, or everything there is: no call
    has to be tried then."""
    code, takes_more = body.__code__, inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    names = code.co_varnames[first : code.co_argcount]
    if code.co_kwonlyargcount or code.co_posonlyargcount:
        return False
    if code.co_flags & takes_more:
        return code.co_flags & takes_more == takes_more and not names
    required = len(names) - len(body.__defaults__ or ())
    return names == tuple(one.name for one in upstream) and all(
        one.kind == "normal" and (one.required or index >= required) for index, one in enumerate(upstream)
    )


def _calls(upstream: Sequence[Parameter]) -> Iterator[_Call]:
    """Calls that upstream accepts and that between them use each of its freedoms. Every argument
    is the name of the parameter that it is for."""
    plain = [one for one in upstream if one.kind in ("positional", "normal")]
    keyword = [one for one in upstream if one.kind == "keyword"]
    more = ["(more)"] if any(one.kind == "args" for one in upstream) else []
    names = {"_any_other": "(more)"} if any(one.kind == "kwargs" for one in upstream) else {}

    def positions(parameters: Sequence[Parameter]) -> list[str]:
        return [one.name for one in parameters]

    def by_name(parameters: Sequence[Parameter]) -> dict[str, str]:
        return {one.name: one.name for one in parameters}

    yield positions(plain) + more, {**by_name(keyword), **names}
    required = [one for one in plain if one.required]
    yield positions(required), by_name([one for one in keyword if one.required])
    # Nobody passes the receiver of a method by its name.
    fixed = sum(one.kind == "positional" for one in plain)
    if plain and not fixed and plain[0].name in _RECEIVERS:
        fixed = 1
    yield positions(plain[:fixed]), {**by_name(plain[fixed:]), **by_name(keyword), **names}


# Checks of one patch against the installed source of its target, importing nothing of it.

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
        recorded: dict[str, dict[str, str]] = {}
        unreadable = ""
        try:
            recorded = {} if fingerprints is None else read_fingerprints(fingerprints)
        except PatchError as error:  # The drift counts; without the record only the span can be named.
            unreadable = f"\n  {error}"
        found = describe_drift(self.source, self.patch.digest, recorded) + unreadable
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
        if patch.optional and not exists(patch.module):
            return Resolution(patch=patch)
        source = _source(patch, cache, unpinned)
        problem = None if source is None else _misfit(patch, source)
        return Resolution(patch=patch, source=source, problem=problem)
    except PatchTargetError as error:
        return Resolution(patch=patch, problem=PatchTargetError(f"patch {patch.id}: {error}"))


def _check_record(patch: Patch) -> None:
    _, qualname = parse_target(patch.target)
    if not qualname and patch.kind not in ("rebind", "module"):
        raise PatchTargetError(
            f"{patch.target!r} is a whole module, which only a rebind and a module can target"
        )
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
    if patch.kind in ("rebind", "module"):
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


# The plan: selection, order, conflicts.

_EXCLUSIVE = ("replace", "value", "add", "constant")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a plan may assume about its surroundings."""

    allow_drift: bool = False
    """Whether an upstream source other than the expected one is a warning instead of an error."""

    fingerprints: Path | None = None
    """File of line hashes (``digest --write``), from which drifted lines are named."""

    cache: Path | None = None
    """File of the digest cache; None keeps nothing between processes."""

    unpinned: tuple[str, ...] = ()
    """Packages of more than one supported version: their targets need no digest."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One patch that was selected and checked."""

    patch: Patch
    module: str
    qualname: str
    digest: str | None
    """Of the installed source, or of the expected one where an optional module is not found; None
    where the kind needs no source or there is none."""

    source: Source | None = None
    """Of the installed source, with the lines that define the target."""

    @property
    def package(self) -> str:
        """The top-level package of the target."""
        return self.module.partition(".")[0]

    def is_checked_for(self, module: ModuleType) -> bool:
        """Whether the source that was checked is what ``module`` was loaded from: the file may have been
        missing then, or another one may come first on ``sys.path`` now."""
        if self.source is None:
            return not self.patch.optional
        return self.source.path == getattr(module, "__file__", None)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked steps in the order of application. Making one changes and imports nothing."""

    backend: str
    why: str
    features: tuple[str, ...] | None
    strict: bool
    steps: tuple[Step, ...]
    left_out: tuple[tuple[Patch, str], ...]
    warnings: tuple[str, ...] = field(default=())
    settings: Settings = field(default=Settings())

    @property
    def digest(self) -> str:
        """sha256 over the backend and every step's id and upstream digest: equal on two ranks
        exactly when both apply the same patches to the same sources."""
        state = hashlib.sha256(self.backend.encode())
        for step in self.steps:
            state.update(f"\n{step.patch.id} {step.digest}".encode())
        return state.hexdigest()


def make_plan(
    patches: Sequence[Patch],
    *,
    backend: str,
    why: str = "",
    features: Collection[str] | None = None,
    strict: bool = True,
    settings: Settings | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Select, order and check; ``notes`` are warnings that the report shall carry too.

    Raises:
        PatchError: a duplicate id, an unknown feature, or an ``after`` that is unknown or a cycle.
        PatchTargetError: a target does not exist, or a body does not fit its signature.
        PatchConflictError: two patches claim one target in a way that cannot be composed.
        UpstreamDriftError: an installed source is not the one that its patch was written against.
    """
    settings = settings or Settings()
    _check_ids(patches)
    selected, left_out = select_patches(patches, backend, features)
    steps, warnings = _checked(_resolve(selected, patches, settings), settings)
    return Plan(
        backend=backend,
        why=why,
        features=None if features is None else tuple(sorted(features)),
        strict=strict,
        steps=tuple(steps),
        left_out=tuple(left_out),
        warnings=(*notes, *warnings),
        settings=settings,
    )


def check_again(plan: Plan, steps: Sequence[Step]) -> Plan:
    """``plan`` with ``steps`` checked against the sources that are there now. Raises as ``make_plan``."""
    cache = DigestCache(plan.settings.cache, SCHEME)
    found = [resolve(step.patch, cache, plan.settings.unpinned) for step in steps]
    cache.save()
    checked, warnings = _checked(found, plan.settings)
    by_id = {step.patch.id: step for step in checked}
    left_out = {step.patch.id for step in steps} - set(by_id)
    kept = (step for step in plan.steps if step.patch.id not in left_out)
    return replace(
        plan,
        steps=tuple(by_id.get(step.patch.id, step) for step in kept),
        warnings=(*plan.warnings, *warnings),
    )


def _checked(resolved: Sequence[Resolution], settings: Settings) -> tuple[list[Step], list[str]]:
    steps: list[Step] = []
    warnings: list[str] = []
    for found in resolved:
        problem = found.obstacle(settings.fingerprints, allow_drift=settings.allow_drift)
        if problem is not None and found.drifted and found.patch.dispensable:
            warnings.append(f"left out: {problem}")
            continue
        if problem is not None:
            raise problem
        if found.drifted:
            warnings.append(found.drift_warning(settings.fingerprints))
        module, qualname = parse_target(found.patch.target)
        digest = found.digest or found.patch.digest
        steps.append(
            Step(patch=found.patch, module=module, qualname=qualname, digest=digest, source=found.source)
        )
    return steps, warnings


def find_problems(patches: Sequence[Patch], *, backend: str, settings: Settings) -> list[PatchError]:
    """Everything that ``make_plan`` would raise, instead of the first only."""
    try:
        _check_ids(patches)
        selected, _ = select_patches(patches, backend, None)
        resolved = _resolve(selected, patches, settings)
    except PatchError as error:
        return [error]
    found = (one.obstacle(settings.fingerprints, allow_drift=settings.allow_drift) for one in resolved)
    return [problem for problem in found if problem is not None]


def _resolve(selected: list[Patch], known: Sequence[Patch], settings: Settings) -> list[Resolution]:
    ordered = _order(selected, {patch.id for patch in known})
    _check_conflicts(ordered)
    cache = DigestCache(settings.cache, SCHEME)
    resolved: dict[str, Resolution] = {}
    # File by file, so that each is read and parsed once; the answer is in the order of the plan.
    for patch in sorted(ordered, key=lambda patch: patch.target):
        resolved[patch.id] = resolve(patch, cache, settings.unpinned)
    cache.save()
    return [resolved[patch.id] for patch in ordered]


def suggest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or nothing."""
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_ids(patches: Sequence[Patch]) -> None:
    seen: set[str] = set()
    for patch in patches:
        if patch.id in seen:
            raise PatchError(f"two patches have the id {patch.id!r}: rename one of them")
        seen.add(patch.id)


def select_patches(
    patches: Sequence[Patch], backend: str, features: Collection[str] | None
) -> tuple[list[Patch], list[tuple[Patch, str]]]:
    """Those that apply to ``backend`` and the installed versions, and the others with the reason.
    Raises PatchError for a feature that no patch has."""
    if isinstance(features, str):
        raise PatchError(f"features={features!r} is one string: expected a list of names, [{features!r}]")
    known = {patch.feature for patch in patches}
    for feature in features or ():
        if feature not in known:
            raise PatchError(
                f"no patch has the feature {feature!r}; known are "
                f"{', '.join(sorted(known))}{suggest(feature, known)}"
            )
    selected: list[Patch] = []
    left_out: list[tuple[Patch, str]] = []
    for patch in patches:
        reason = _reason_to_leave_out(patch, backend, features)
        if reason is None:
            selected.append(patch)
        else:
            left_out.append((patch, reason))
    return selected, left_out


def _reason_to_leave_out(patch: Patch, backend: str, features: Collection[str] | None) -> str | None:
    if patch.backends is not None and backend not in patch.backends:
        return f"is for backend {' or '.join(sorted(patch.backends))}, this is {backend}"
    if features is not None and patch.feature not in features:
        return f"feature {patch.feature!r} was not asked for"
    for distribution, wanted in patch.requires.items():
        found = installed_version(distribution)
        if found is None:
            return f"needs {distribution} {wanted}, which is not installed"
        if not within(found, wanted):
            return f"needs {distribution} {wanted}, found {found}"
    return next((f"{name} can be imported" for name in patch.unless if exists(name)), None)


def installed_version(distribution: str) -> str | None:
    """The version in the distribution's metadata; None when it is not installed."""
    return _installed_version(distribution, tuple(sys.path))


@lru_cache(maxsize=64)
def _installed_version(distribution: str, path: tuple[str, ...]) -> str | None:
    # Reading the metadata of torch takes milliseconds, and many patches ask for it.
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def within(version: str, specifier: str) -> bool:
    """Whether a PEP 440 version is inside a specifier; pre-releases count as what they precede."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _order(patches: list[Patch], known: Collection[str]) -> list[Patch]:
    """The given order, changed only as far as ``after`` asks for."""
    by_id = {patch.id: patch for patch in patches}
    for patch in patches:
        for earlier in patch.after:
            if earlier not in known:
                raise PatchError(
                    f"patch {patch.id} comes after {earlier!r}, but no patch has that id"
                    f"{suggest(earlier, known)}"
                )
    ordered: dict[str, Patch] = {}
    path: list[str] = []

    def visit(patch: Patch) -> None:
        if patch.id in ordered:
            return
        if patch.id in path:
            cycle = " -> ".join([*path[path.index(patch.id) :], patch.id])
            raise PatchError(f"the 'after' edges form a cycle: {cycle}")
        path.append(patch.id)
        for earlier in patch.after:
            if earlier in by_id:
                visit(by_id[earlier])
        path.pop()
        ordered[patch.id] = patch

    for patch in patches:
        visit(patch)
    return list(ordered.values())


def _check_conflicts(ordered: Sequence[Patch]) -> None:
    first: dict[str, list[Patch]] = {}
    for patch in ordered:
        for other in first.get(patch.target, ()):
            _check_pair(other, patch)
        first.setdefault(patch.target, []).append(patch)
    taken = {patch.target: patch for patch in ordered if patch.kind in ("replace", "value", "add")}
    for patch in ordered:
        outer = patch.target.rpartition(".")[0]
        while ":" in outer:
            if outer in taken:
                raise PatchConflictError(
                    f"patch {patch.id} changes {patch.target}, but patch {taken[outer].id} puts another "
                    f"object at {outer}: change that object's own code, or patch its methods only"
                )
            outer = outer.rpartition(".")[0]


def _check_pair(earlier: Patch, later: Patch) -> None:
    both = f"{earlier.id} ({earlier.kind}) and {later.id} ({later.kind})"
    if "rebind" in (earlier.kind, later.kind):
        overlap = earlier.kind != later.kind or any(
            in_package(a, b) or in_package(b, a) for a in earlier.scope for b in later.scope
        )
        if overlap:
            raise PatchConflictError(
                f"patches {both} both decide what {later.target} means for the same modules: keep one"
            )
    elif earlier.kind in _EXCLUSIVE and later.kind in _EXCLUSIVE:
        raise PatchConflictError(
            f"patches {both} both claim {later.target}: keep one, or make the second a wrap"
        )
    elif later.kind in _EXCLUSIVE:
        raise PatchConflictError(
            f"patch {earlier.id} wraps {later.target} before {later.id} ({later.kind}) takes its place, "
            f"so the wrap would be lost: give {earlier.id} after=({later.id!r},)"
        )

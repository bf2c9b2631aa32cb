"""Perturbations as data: what is changed, where, when and how; read from YAML or from a command's map.

    seed: 7
    snapshot_limit_mib: 4096
    perturbations:
      - name: exponent
        kind: bit_flip
        on: weight
        module: decoder.layers.3.mlp.linear_fc1.weight
        bit: 30
        index: [17, 5]
        steps: 100-109
        undo_at: 130

Nothing here needs torch or a model; ``targets`` finds what a pattern means in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint

_Read = TypeVar("_Read")

Kind = Literal[
    "bit_flip", "gaussian", "uniform", "mask", "scale", "stuck", "delay", "drop", "offset", "fault"
]
On = Literal["weight", "activation", "gradient", "weight_gradient", "communication", "host"]

VALUES: tuple[Kind, ...] = ("bit_flip", "gaussian", "uniform", "mask", "scale", "stuck")
"""Kinds that change elements of a tensor."""

LINKS: tuple[Kind, ...] = ("delay", "drop", "offset")
"""Kinds that change communication between ranks."""

TENSORS: tuple[On, ...] = ("weight", "activation", "gradient", "weight_gradient")

FIGURES: Mapping[Kind, Mapping[str, float | None]] = {
    "bit_flip": {"bit": None},
    "gaussian": {"sigma": None, "mean": 0.0},
    "uniform": {"low": None, "high": None},
    "mask": {},
    "scale": {"factor": None},
    "stuck": {"value": None},
    "delay": {"ms": None},
    "drop": {"timeout_ms": 10.0, "rate": 1.0, "retries": 1.0},
    "offset": {"value": None},
    "fault": {},
}
"""Numbers of each kind with what they are when left out; None: they must be given."""

MOST_PERTURBATIONS = 64
MOST_INDICES = 4096
LONGEST_DELAY_MS = 60_000.0
_NOT_FINITE_ALLOWED = {("stuck", "value"), ("offset", "value"), ("scale", "factor")}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A range of steps, both ends included; steps count from 1."""

    first: int | None = None
    """None: the step after the one at which the perturbation is armed."""

    last: int | None = None
    """None: until it is disarmed or undone."""

    def __contains__(self, step: int) -> bool:
        return (self.first is None or step >= self.first) and (self.last is None or step <= self.last)

    def text(self) -> str:
        """``12``, ``10-12`` or ``10-``."""
        if self.first is not None and self.first == self.last:
            return str(self.first)
        first = "next" if self.first is None else str(self.first)
        return f"{first}-{'' if self.last is None else self.last}"


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """One change that is made on purpose."""

    name: str
    """Of its own among those that are armed; a part of its random numbers' key."""

    kind: Kind

    on: On

    module: str = ""
    """Pattern (``*``, ``?``, ``[...]``) of module paths in the whole model, for ``weight`` and
    ``weight_gradient`` of parameter paths (``decoder.layers.3.mlp.linear_fc1.weight``)."""

    figures: Mapping[str, float] = field(default_factory=dict)
    """By name as in ``FIGURES``, complete."""

    relative: bool = False
    """Noise: multiplied by the value (``x * (1 + noise)``) instead of added to it."""

    steps: Steps = field(default_factory=Steps)

    undo_at: int | None = None
    """Step after which everything since it first acted is undone by itself; None: by command alone."""

    ranks: tuple[int, ...] | None = None
    """Global ranks on which it acts; None: all. Of communication: the two ends of the link."""

    layers: tuple[int, ...] | None = None
    """Layers from 0 over the whole model; None: all that the pattern meets."""

    heads: tuple[int, ...] | None = None
    """Attention heads from 0 over the whole layer; None: all elements."""

    microbatches: tuple[int, ...] | None = None
    """Micro-batches of each data-parallel rank, from 0; None: all. Activations and gradients only."""

    index: tuple[tuple[int, ...], ...] | None = None
    """Elements in the whole tensor (of activations: position, sample of the step, feature); None: all, or
    what ``fraction`` draws."""

    fraction: float | None = None
    """Share of the elements, each drawn by itself; None: all."""

    seed: int = 0

    group: str | None = None
    """Of communication: a group's name (``tp``, ``dp``, ``pp`` ...) whose collectives are meant as well,
    where both ends are members; None: transfers between the two and collectives of the two alone."""

    master: bool = False
    """Of weights in half precision: whether the optimizer's fp32 copy is changed too. Without it the next
    update overwrites the change."""

    differentiate: bool = False
    """Of activations: whether backward is that of the changed function (a masked element gets no gradient,
    a scaled one the scaled one). False: gradients pass as though nothing were changed, as with a fault of
    the machine."""

    snapshot: bool = True
    """Whether the state before it is kept, so that it can be undone."""

    fault: str = ""
    """Of kind ``fault``: as ``scan inject`` takes it, such as ``slow_compute:rank=3,factor=1.5``."""

    def text(self) -> str:
        """One line for people."""
        if self.kind == "fault":
            return f"{self.fault} in steps {self.steps.text()}"
        figures = "".join(f" {name}={value:g}" for name, value in self.figures.items())
        where = self.module or f"ranks {'-'.join(map(str, self.ranks or ()))}"
        if self.relative:
            figures += " relative"
        more = [
            f"{name} {','.join(map(str, value))}"
            for name in ("layers", "heads", "microbatches")
            if (value := getattr(self, name)) is not None
        ]
        if self.ranks is not None and self.on != "communication":
            more.append(f"ranks {','.join(map(str, self.ranks))}")
        if self.index is not None:
            more.append(f"{len(self.index)} element(s)")
        if self.fraction is not None:
            more.append(f"a share of {self.fraction:g}")
        narrower = "".join(f", {each}" for each in more)
        return f"{self.kind}{figures} on {self.on} {where}{narrower}, steps {self.steps.text()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values that ``perturbation_from`` reads back to the same."""
        plain = asdict(self)
        plain |= plain.pop("figures")
        plain["steps"] = self.steps.text().removeprefix("next-") or None
        if self.steps.first is None and self.steps.last is not None:
            plain["steps"] = None
        for name in ("ranks", "layers", "heads", "microbatches"):
            plain[name] = None if plain[name] is None else list(plain[name])
        plain["index"] = None if self.index is None else [list(each) for each in self.index]
        left_out = {each.name: each.default for each in fields(self)}
        return {key: value for key, value in plain.items() if value != left_out.get(key, ...)}


@dataclass(frozen=True, kw_only=True)
class LabFile:
    """Perturbations of one file, and how much memory their undo may take."""

    perturbations: tuple[Perturbation, ...]

    snapshot_limit_mib: float | None = None
    """Host memory that snapshots of one rank may take; None: half of what is free, shared among the ranks of
    the machine."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Builds plain values; a key that is written twice is an error, of which YAML would keep the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Before keys are merged, which may override one another.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            before = seen.setdefault(str(key.value), key)
            if before is not key and key.value != "<<":
                raise ConfigError(
                    f"found {key.value} twice in one map, at line {before.start_mark.line + 1} and line "
                    f"{key.start_mark.line + 1}; keep one of them"
                )
        return node


def read_lab_file(path: Path | str) -> LabFile:
    """What the YAML file says. Raises ``ConfigError`` that names the entry."""
    try:
        given = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--scope-lab: {path} cannot be read: {error}. Check its path") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"--scope-lab: {path} is no valid YAML: {said}. Correct the file") from error
    except ConfigError as error:
        raise ConfigError(f"--scope-lab: {path}: {error}") from error
    try:
        return lab_file_from(given)
    except ConfigError as error:
        raise ConfigError(f"--scope-lab: {path}: {error}") from error


def lab_file_from(given: Any) -> LabFile:
    """The same of plain values. Raises ``ConfigError``."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"found {_kind_of(given)}; expected a map with the key 'perturbations'")
    known = ("perturbations", "seed", "snapshot_limit_mib")
    for key in given:
        if key not in known:
            raise ConfigError(f"found the key {key!r}; expected {', '.join(known)}.{hint(str(key), known)}")
    entries = given.get("perturbations")
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_PERTURBATIONS:
        raise ConfigError(
            f"found perturbations: {_kind_of(entries)}; expected a list of 1 to {MOST_PERTURBATIONS}"
        )
    seed = _whole(given.get("seed", 0), "seed", least=0)
    found: list[Perturbation] = []
    for number, entry in enumerate(entries):
        try:
            one = perturbation_from(entry, default_name=f"p{number}", default_seed=seed)
        except ConfigError as error:
            name = entry.get("name") if isinstance(entry, Mapping) else None
            raise ConfigError(f"perturbations[{number}]{f' ({name})' if name else ''}: {error}") from error
        if any(one.name == other.name for other in found):
            raise ConfigError(
                f"perturbations[{number}]: found the name {one.name!r} twice; give each its own"
            )
        found.append(one)
    return LabFile(perturbations=tuple(found), snapshot_limit_mib=snapshot_limit_of(given))


def snapshot_limit_of(given: Mapping[str, Any]) -> float | None:
    """``snapshot_limit_mib`` of a file or a command. Raises ``ConfigError``."""
    return _optional(given, "snapshot_limit_mib", lambda value: _number(value, "snapshot_limit_mib", least=0))


def perturbation_from(given: Any, *, default_name: str = "p0", default_seed: int = 0) -> Perturbation:
    """The perturbation that a map of plain values describes. Raises ``ConfigError``: a figure that is
    missing, does not belong to the kind or is out of range, an unknown key, two ways of choosing elements."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"found {_kind_of(given)}; expected a map with kind, on, module ...")
    # YAML 1.1 reads the key ``on`` as true.
    entry = {"on" if key is True else str(key): value for key, value in given.items()}
    kind, on = _kind_and_place(entry)
    figures = _figures(kind, entry)
    known = {each.name for each in fields(Perturbation)} - {"figures"} | set(FIGURES[kind])
    for key in entry:
        if key not in known:
            belongs = [other for other, names in FIGURES.items() if key in names]
            more = f" ({key} belongs to {', '.join(belongs)})" if belongs else hint(key, known)
            raise ConfigError(f"found the key {key!r}; expected one of {', '.join(sorted(known))}.{more}")
    name = entry.get("name", default_name)
    if not isinstance(name, str) or not 0 < len(name) <= 80 or not name.isprintable():
        raise ConfigError(f"found name: {name!r}; expected a text of 1 to 80 characters")
    one = Perturbation(
        name=name,
        kind=kind,
        on=on,
        module=_text(entry.get("module", ""), "module"),
        figures=figures,
        relative=_flag(entry.get("relative", False), "relative"),
        steps=_steps(entry.get("steps")),
        undo_at=_optional(entry, "undo_at", lambda value: _whole(value, "undo_at", least=1)),
        ranks=_optional(entry, "ranks", lambda value: _wholes(value, "ranks")),
        layers=_optional(entry, "layers", lambda value: _wholes(value, "layers")),
        heads=_optional(entry, "heads", lambda value: _wholes(value, "heads")),
        microbatches=_optional(entry, "microbatches", lambda value: _wholes(value, "microbatches")),
        index=_optional(entry, "index", _index),
        fraction=_optional(entry, "fraction", _share),
        seed=_whole(entry.get("seed", default_seed), "seed", least=0),
        group=_optional(entry, "group", lambda value: _text(value, "group")),
        master=_flag(entry.get("master", False), "master"),
        differentiate=_flag(entry.get("differentiate", False), "differentiate"),
        snapshot=_flag(entry.get("snapshot", True), "snapshot"),
        fault=_text(entry.get("fault", ""), "fault"),
    )
    _require_consistent(one)
    return one


def is_over(one: Perturbation, done: int) -> bool:
    """Whether all that ``one`` asks for lies in the first ``done`` steps."""
    last = one.steps.last
    return (last is not None and last <= done) or (one.undo_at is not None and one.undo_at <= done)


def starting_at(one: Perturbation, step: int) -> Perturbation:
    """``one`` with its first step said: ``step`` where it leaves that open. Raises ``ConfigError`` where its
    steps are over before ``step``."""
    steps = replace(one.steps, first=step) if one.steps.first is None else one.steps
    if steps.last is not None and steps.last < step:
        raise ConfigError(
            f"found steps {steps.text()}; expected the last to be {step}, the next step, or later"
        )
    if one.undo_at is not None and one.undo_at < max(step, steps.first or step):
        raise ConfigError(
            f"found undo_at: {one.undo_at}; expected at least the first of steps {steps.text()}"
        )
    return replace(one, steps=steps)


def _kind_and_place(entry: Mapping[str, Any]) -> tuple[Kind, On]:
    kind: Any = entry.get("kind")
    if kind not in FIGURES:
        raise ConfigError(
            f"found kind: {kind!r}; expected one of {', '.join(FIGURES)}.{hint(str(kind), FIGURES)}"
        )
    places: tuple[On, ...] = TENSORS if kind in VALUES else ("communication",) if kind in LINKS else ("host",)
    on: Any = entry.get("on", places[0] if len(places) == 1 else None)
    if on not in places:
        everywhere = get_args(On)
        raise ConfigError(
            f"found on: {on!r} for kind {kind}; expected {' or '.join(places)}.{hint(str(on), everywhere)}"
        )
    return kind, on


def _figures(kind: Kind, entry: Mapping[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, default in FIGURES[kind].items():
        value = entry.get(name, default)
        if value is None:
            needed = ", ".join(FIGURES[kind])
            raise ConfigError(f"found no {name} for kind {kind}; expected numbers for {needed}")
        figures[name] = _number(value, name, finite=(kind, name) not in _NOT_FINITE_ALLOWED)
    return figures


def _require_consistent(one: Perturbation) -> None:
    figures = one.figures
    if one.kind == "bit_flip" and not (figures["bit"].is_integer() and 0 <= figures["bit"] < 64):
        raise ConfigError(
            f"found bit: {figures['bit']:g}; expected 0 (the lowest) to 31 in fp32, 15 in bf16 and fp16"
        )
    if one.kind == "gaussian" and figures["sigma"] < 0:
        raise ConfigError(f"found sigma: {figures['sigma']:g}; expected 0 or more")
    if one.kind == "uniform" and figures["low"] > figures["high"]:
        raise ConfigError(f"found low: {figures['low']:g} above high: {figures['high']:g}; swap them")
    if one.kind == "delay" and not 0 < figures["ms"] <= LONGEST_DELAY_MS:
        raise ConfigError(
            f"found ms: {figures['ms']:g}; expected more than 0 and at most {LONGEST_DELAY_MS:g}"
        )
    if one.kind == "drop":
        if not 0 < figures["rate"] <= 1:
            raise ConfigError(f"found rate: {figures['rate']:g}; expected more than 0 and at most 1")
        if not (figures["retries"].is_integer() and 1 <= figures["retries"] <= 100):
            raise ConfigError(f"found retries: {figures['retries']:g}; expected 1 to 100")
        if not 0 <= figures["timeout_ms"] <= LONGEST_DELAY_MS:
            raise ConfigError(
                f"found timeout_ms: {figures['timeout_ms']:g}; expected 0 to {LONGEST_DELAY_MS:g}"
            )
    if one.relative and one.kind not in ("gaussian", "uniform"):
        raise ConfigError(f"found relative for kind {one.kind}; it belongs to gaussian and uniform")
    if one.index is not None and (one.fraction is not None or one.heads is not None):
        other = "fraction" if one.fraction is not None else "heads"
        raise ConfigError(f"found index and {other}; expected one way of choosing elements")
    outputs = ("activation", "gradient")
    if one.index is not None and one.on in outputs and any(len(each) != 3 for each in one.index):
        raise ConfigError(
            f"found an index for on: {one.on} that is not [position, sample of the step, feature]; give "
            "three numbers"
        )
    if one.on in TENSORS and not one.module:
        raise ConfigError(
            f"found no module for on: {one.on}; expected a pattern of paths, such as '*.mlp.linear_fc2'"
        )
    if one.on in ("weight", "weight_gradient") and one.microbatches is not None:
        raise ConfigError(f"found microbatches for on: {one.on}; they belong to activation and gradient")
    if one.master and one.on != "weight":
        raise ConfigError(f"found master for on: {one.on}; it belongs to weight")
    if one.differentiate and one.on != "activation":
        raise ConfigError(f"found differentiate for on: {one.on}; it belongs to activation")
    if one.on == "communication":
        if one.ranks is None or len(one.ranks) != 2 or one.ranks[0] == one.ranks[1]:
            raise ConfigError(
                f"found ranks: {one.ranks} for {one.kind}; expected the two ends of a link, such as [0, 1]"
            )
        for name in ("layers", "heads", "microbatches", "index", "fraction"):
            if getattr(one, name) is not None:
                raise ConfigError(f"found {name} for on: communication; expected ranks, group and steps")
    elif one.group is not None:
        raise ConfigError(f"found group for on: {one.on}; it belongs to communication")
    if (one.kind == "fault") != bool(one.fault):
        raise ConfigError("found a fault without its text or a text without kind: fault; expected both")
    if one.undo_at is not None and not one.snapshot:
        raise ConfigError(
            "found undo_at and snapshot: false; expected a snapshot, since nothing can be undone without"
        )


def _steps(given: Any) -> Steps:
    if given is None:
        return Steps()
    wrong = ConfigError(f"found steps: {given!r}; expected a number, 'FIRST-LAST', 'FIRST-' or [FIRST, LAST]")
    if isinstance(given, bool):
        raise wrong
    if isinstance(given, int):
        first, last = given, given
    elif isinstance(given, str):
        begin, dash, end = given.partition("-")
        if not begin.isdigit() or (end and not end.isdigit()):
            raise wrong
        first = int(begin)
        last = int(end) if end else None if dash else first  # type: ignore[assignment]
    elif isinstance(given, Sequence) and len(given) == 2 and all(type(each) is int for each in given):
        first, last = given
    else:
        raise wrong
    if first < 1 or (last is not None and last < first):
        raise ConfigError(
            f"found steps: {given!r}; expected a first of at least 1 and a last that is not before it"
        )
    return Steps(first=first, last=last)


def _index(given: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(given, int) and not isinstance(given, bool):
        given = [[given]]
    elif isinstance(given, list) and given and all(type(each) is int for each in given):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_INDICES:
        raise ConfigError(
            f"found index: {_kind_of(given)}; expected [row, column] or a list of at most {MOST_INDICES}"
        )
    found = []
    for each in given:
        if not isinstance(each, list) or not each or any(type(part) is not int or part < 0 for part in each):
            raise ConfigError(f"found index: {each!r}; expected whole numbers from 0, such as [17, 5]")
        found.append(tuple(each))
    return tuple(found)


def _share(given: Any) -> float:
    share = _number(given, "fraction", least=0.0)
    if not 0 < share <= 1:
        raise ConfigError(f"found fraction: {share:g}; expected more than 0 and at most 1")
    return share


def _optional(entry: Mapping[str, Any], name: str, read: Callable[[Any], _Read]) -> _Read | None:
    value = entry.get(name)
    return None if value is None else read(value)


def _wholes(given: Any, name: str) -> tuple[int, ...]:
    listed = given if isinstance(given, list | tuple) else [given]
    if not listed or len(listed) > MOST_INDICES:
        raise ConfigError(f"found {name}: {given!r}; expected whole numbers from 0")
    return tuple(_whole(each, name, least=0) for each in listed)


def _whole(given: Any, name: str, *, least: int) -> int:
    if type(given) is not int or not least <= given < 2**63:
        raise ConfigError(f"found {name}: {given!r}; expected a whole number of at least {least}")
    return given


def _number(given: Any, name: str, *, least: float = -math.inf, finite: bool = True) -> float:
    if isinstance(given, str):
        # YAML reads 1e-3 as a text, and JSON has neither nan nor inf.
        try:
            given = float(given)
        except ValueError:
            raise ConfigError(f"found {name}: {given!r}; expected a number") from None
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ConfigError(f"found {name}: {given!r}; expected a number")
    value = float(given)
    if value < least or (finite and not math.isfinite(value)):
        raise ConfigError(f"found {name}: {value:g}; expected a {'finite ' if finite else ''}number")
    return value


def _text(given: Any, name: str) -> str:
    if not isinstance(given, str) or len(given) > 400 or not given.isprintable():
        raise ConfigError(f"found {name}: {given!r}; expected a text of at most 400 characters")
    return given


def _flag(given: Any, name: str) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"found {name}: {given!r}; expected true or false")
    return given


def _kind_of(given: Any) -> str:
    if given is None:
        return "nothing"
    return f"a list of {len(given)}" if isinstance(given, list) else type(given).__name__

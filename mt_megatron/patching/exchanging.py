"""Exchange a target's value in everything that holds it: forward when patching, back when undoing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .journal import Journal
from .kinds import underlying
from .places import MISSING, Arguments, Attribute, Element, Key, exchange
from .plan import Step
from .rebind import Original, Reach, holders, reach
from .referrers import Held, Search


@dataclass(frozen=True)
class Given:
    """``new`` was put at ``place`` instead of ``old`` (``MISSING``: of nothing); who imports the
    name from then on gets ``new``."""

    place: Attribute
    old: Any
    new: Held
    step: Step
    unique: bool
    """Whether nobody else had ``new`` when it was put there."""


def originals_of(steps: Iterable[Step], places: dict[str, Attribute]) -> list[Original]:
    """What is about to give way, once per target. Only ``Held`` refers to it."""
    found: dict[str, list[Original]] = {}
    for step in steps:
        target, place = step.patch.target, places[step.patch.target]
        if step.patch.kind in ("constant", "add", "fields") or target in found or place.read() is MISSING:
            continue
        raw = Held(place.read())
        found[target] = _pair(raw, place, step, reach(raw.value, step.package))
    return [original for pair in found.values() for original in pair]


def _pair(raw: Held, place: Attribute, step: Step, how: Reach) -> list[Original]:
    """The value itself and, in a descriptor, the function that others may hold without it."""
    pair = [Original(raw, place, step.module, how)]
    if underlying(raw.value) is not raw.value:
        pair.append(Original(Held(underlying(raw.value)), place, step.module, how, raw))
    return pair


def private_ids(body: Any) -> list[int]:
    """Ids of what a body keeps for itself: it may hold the original, and has to go on doing so."""
    closure = getattr(body, "__closure__", None) or ()
    keywords = getattr(body, "__kwdefaults__", None)
    kept = [*closure, closure, getattr(body, "__defaults__", None), keywords, body]
    if isinstance(body, type):
        kept += [body.__mro__, body.__bases__, *body.__mro__]
    return [id(one) for one in kept if one is not None]


def write_holders(
    journal: Journal, originals: Iterable[Original], found: Search, blame: dict[Any, str]
) -> None:
    """Let every holder that was found have what is at the originals' targets now."""
    moves = [
        (original.held.value, new, blame[original.target.key])
        for original in originals
        for new in [_successor(original)]
        if new is not MISSING
    ]
    _write(journal, found, moves)


def _successor(original: Original, value: Any = MISSING) -> Any:
    new = original.target.read() if value is MISSING else value
    if original.descriptor is None:
        return new
    return underlying(new) if type(new) is type(original.descriptor.value) else MISSING


def _write(journal: Journal, found: Search, moves: Sequence[tuple[Any, Any, str]]) -> None:
    seen: set[Any] = set()
    for holder in found.holders:
        place = holder.place
        several = isinstance(place, (Element, Key))
        key = (*place.key, id(holder.held)) if several else place.key
        if key in seen:
            continue
        seen.add(key)
        held = place.read() if isinstance(place, Arguments) else holder.held
        changed, patches = held, list[str]()
        for old, new, patch_id in moves:
            result = exchange(changed, old, new)
            if result is not changed:
                changed, patches = result, [*patches, patch_id]
        if place.state(held) == "ours":
            journal.write(place, held, changed, ", ".join(dict.fromkeys(patches)))


def give_back(given: Iterable[Given]) -> Search:
    """After everything recorded was written back: whoever bound a patched value since then, by
    ``from owner import name`` for example, gets the original. Returns what could not be given."""
    pairs = [
        (original, one)
        for one in given
        if one.old is not MISSING
        for original in _pair(one.new, one.place, one.step, "everywhere" if one.unique else "imports")
    ]
    found = holders([original for original, _ in pairs])
    moves = [
        (original.held.value, old, one.step.patch.id)
        for original, one in pairs
        for old in [_successor(original, one.old)]
        if old is not MISSING
    ]
    _write(Journal(), found, moves)
    return found

"""Execution order of modules, from the order in which ranks hold them (parents before children)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_DEPTH = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)(?:\.|$)")

_LAST_OF_ATTENTION = ("core_attention", "linear_proj")
"""Megatron-Core builds them before the projections that they work on."""


def layer_of(path: str) -> int | None:
    """Number of the layer that ``path`` lies in, counted through the whole model from 0; None within a depth
    of multi-token prediction, which is none of the model's layers."""
    found = None if _DEPTH.search(path) else _LAYER.search(path)
    return int(found[1]) if found else None


def place_of(path: str) -> tuple[int, str] | None:
    """Number and label of the layer, or of the depth of multi-token prediction, that ``path`` lies in; None
    outside of both."""
    depth = _DEPTH.search(path)
    if depth:
        return int(depth[1]), f"MTP {depth[1]}"
    layer = layer_of(path)
    return None if layer is None else (layer, str(layer))


def execution_order(lists: Iterable[Sequence[str]]) -> list[str]:
    """Paths of all ``lists`` (one a rank, each as ``named_modules`` gives it) in the order in which a forward
    pass completes their outputs: children before their parent, layers by number. The path of the whole model
    is empty."""
    children: dict[str, list[list[str]]] = {}
    known: dict[str, None] = {}
    for paths in lists:
        own: dict[str, dict[str, None]] = {}
        for path in paths:
            known[path] = None
            if not path or path.startswith("."):
                continue  # an empty first name would be its own child, without end
            parent = ""
            for name in path.split("."):
                own.setdefault(parent, {})[name] = None
                parent = f"{parent}.{name}" if parent else name
        for parent, found in own.items():
            children.setdefault(parent, []).append(list(found))
    walked = dict.fromkeys(path for path in _walk("", children) if path in known)
    return [*walked, *(path for path in known if path not in walked)]


def _walk(parent: str, children: dict[str, list[list[str]]]) -> Iterator[str]:
    stack: list[tuple[str, Iterator[str]]] = [(parent, iter(_merged(children.get(parent, []))))]
    while stack:
        path, left = stack[-1]
        name = next(left, None)
        if name is not None:
            inner = f"{path}.{name}" if path else name
            stack.append((inner, iter(_merged(children.get(inner, [])))))
            continue
        stack.pop()
        yield path


def _merged(lists: list[list[str]]) -> list[str]:
    """Names in an order that agrees with every list, numbers ascending."""
    names = list(dict.fromkeys(name for names in lists for name in names))
    if names and all(name.isdigit() for name in names):
        return sorted(names, key=int)
    if len(lists) > 1:
        names = _sorted(names, lists)
    if _LAST_OF_ATTENTION[0] in names:
        last = [name for name in _LAST_OF_ATTENTION if name in names]
        names = [name for name in names if name not in last] + last
    return names


def _sorted(names: list[str], lists: list[list[str]]) -> list[str]:
    graph: dict[str, set[str]] = {name: set() for name in names}
    for each in lists:
        for before, after in zip(each, each[1:], strict=False):
            graph[after].add(before)
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError:
        return names  # ranks that disagree: by first appearance
    place = {name: index for index, name in enumerate(names)}
    found: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        first = min(ready, key=place.__getitem__)
        ready.discard(first)
        found.append(first)
        sorter.done(first)
    return found

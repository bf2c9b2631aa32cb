"""Say which lines of a target drifted, from hashes of the lines that a patch was written against.

The file of fingerprints holds no upstream source, only a short hash of every line's tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path

from .digest import DEDENT, INDENT, MARKERS, Source, meaningful_tokens, parse_file

_SHOWN = 12


def fingerprint(source: Source) -> list[tuple[int, str]]:
    """``(line number, hash of the line's tokens and nesting)`` of every line that carries meaning."""
    text, tree = parse_file(Path(source.path))
    tokens = meaningful_tokens(text, tree, source.definition.segments)
    found: list[tuple[int, str]] = []
    depth = 0
    for line, group in groupby(tokens, key=lambda pair: pair[0]):
        words = [token for _, token in group]
        # The nesting itself and not its change, which would mark the next line as drifted too.
        depth += words.count(INDENT) - words.count(DEDENT)
        state = hashlib.sha256(str(depth).encode())
        state.update("\0".join(word for word in words if word not in MARKERS).encode())
        if any(word not in MARKERS for word in words):
            found.append((line, state.hexdigest()[:8]))
    return found


def write_fingerprints(path: Path, sources: Iterable[Source]) -> None:
    """Write what ``describe_drift`` reads: per target its digest and its lines' hashes, the line
    numbers relative to the first."""
    content = {
        source.target: {
            "digest": source.digest,
            "lines": " ".join(f"{line - source.first_line}:{mark}" for line, mark in fingerprint(source)),
        }
        for source in sorted(sources, key=lambda source: source.target)
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_fingerprints(path: Path) -> dict[str, dict[str, str]]:
    """The content of a file of fingerprints; empty when there is none."""
    if not path.exists():
        return {}
    content: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return content


def describe_drift(
    source: Source, expected_digest: str, fingerprints: Mapping[str, Mapping[str, str]]
) -> str:
    """The drifted lines of ``source``, as installed, each with its line number.

    Without a fingerprint of the source that has ``expected_digest`` only the span can be named.
    """
    span = f"{source.path}:{source.first_line}-{source.last_line}"
    recorded = fingerprints.get(source.target)
    if recorded is None or recorded["digest"] != expected_digest:
        return f"somewhere in {span} (no line hashes are recorded for digest {expected_digest[:12]})"
    old = [mark.partition(":") for mark in recorded["lines"].split()]
    new = fingerprint(source)
    text = parse_file(Path(source.path))[0].split("\n")
    shown: list[str] = []
    places: list[str] = []
    matcher = SequenceMatcher(None, [mark for _, _, mark in old], [mark for _, mark in new], autojunk=False)
    for tag, old_first, old_last, first, last in matcher.get_opcodes():
        if tag == "equal":
            continue
        lost = old_last - old_first
        if first == last:
            before = new[first][0] if first < len(new) else source.last_line + 1
            places.append(str(before))
            shown.append(f"    {before:>5} ! {lost} expected line(s) are missing before this line")
            continue
        numbers = [line for line, _ in new[first:last]]
        places.append(f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]}-{numbers[-1]}")
        shown += [f"    {line:>5} + {text[line - 1]}" for line in numbers if line <= len(text)]
        shown.append(
            f"          ! {f'in place of {lost} expected' if lost else 'not among the expected'} line(s)"
        )
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"          ... and {len(shown) - _SHOWN} more"]
    return "\n".join([f"{source.path}, line(s) {', '.join(places)} of {span.rpartition(':')[2]}:", *shown])

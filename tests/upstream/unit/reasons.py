"""Reviewed reasons of upstream's tests that do not pass: read from a file, held against what a run found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("reasons.toml")
KINDS = (
    "needs Transformer Engine itself",
    "needs a GPU kernel",
    "asks for a device called cuda",
    "needs another package",
    "needs another rank count",
    "needs more memory",
    "skipped by its author",
    "wrong in the test",
    "ours",
)
_KEYS = {"kind", "evidence", "tests", "says", "ranks"}
_OPTIONAL = {"backends", "sometimes"}


class ReasonsError(ValueError):
    """The file of reasons has a mistake; the message names the entry."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why tests do not pass."""

    kind: str
    evidence: str
    tests: tuple[str, ...]
    """Patterns of tests, below the folder of the unit tests; ``*`` stands for any text."""
    says: str
    """Part of what the test says where this is its reason."""
    ranks: tuple[int, ...]
    backends: tuple[str, ...]
    sometimes: bool
    """Whether the tests draw random numbers and pass with most: the reason is not stale then."""

    def is_for(self, backend: str, ranks: int) -> bool:
        return backend in self.backends and ranks in self.ranks


@dataclass(frozen=True, kw_only=True)
class Reviewed:
    """A combination all of whose tests have been looked at."""

    backend: str
    ranks: tuple[int, ...]
    files: tuple[str, ...]
    """Files, or folders of them, below the folder of the unit tests; empty for all."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the reasons say about one run."""

    explained: Mapping[str, Reason]
    problems: Sequence[str]
    """Empty where every test that was reviewed and does not pass has one reason, and every reason a test."""
    unreviewed: Sequence[str]
    """Tests that do not pass, of a combination that nobody has reviewed: no verdict."""


def read(path: Path = FILE) -> tuple[list[Reviewed], list[Reason]]:
    """The reviewed combinations and the reasons. Raises ReasonsError."""
    import tomllib

    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := data.keys() - {"reviewed", "reason"}:
        raise ReasonsError(
            f"{path.name}: found tables {sorted(unknown)}; expected [[reviewed]] and [[reason]]"
        )
    reviewed = [
        Reviewed(backend=each["backend"], ranks=tuple(each["ranks"]), files=tuple(each.get("files", ())))
        for each in data.get("reviewed", ())
    ]
    return reviewed, [_reason(path.name, each) for each in data.get("reason", ())]


def _reason(name: str, entry: dict[str, Any]) -> Reason:
    where = f"{name}: the reason for {entry.get('tests')}"
    if entry.keys() - _KEYS - _OPTIONAL or _KEYS - entry.keys():
        raise ReasonsError(
            f"{where} has {sorted(entry)}; expected {sorted(_KEYS)} and perhaps {sorted(_OPTIONAL)}"
        )
    if entry["kind"] not in KINDS:
        raise ReasonsError(f"{where} has the kind {entry['kind']!r}; expected one of {', '.join(KINDS)}")
    if not (entry["tests"] and entry["evidence"].strip() and entry["says"] and entry["ranks"]):
        raise ReasonsError(f"{where} has an empty tests, evidence, says or ranks")
    return Reason(
        kind=entry["kind"], evidence=entry["evidence"], says=entry["says"], tests=tuple(entry["tests"]),
        ranks=tuple(entry["ranks"]), backends=tuple(entry.get("backends", ("cpu", "musa"))),
        sometimes=entry.get("sometimes", False),
    )  # fmt: skip


def judge(
    found: Mapping[str, str],
    ran: Iterable[str],
    reviewed: Sequence[Reviewed],
    reasons: Sequence[Reason],
    *,
    backend: str,
    ranks: int,
    complete: bool,
) -> Verdict:
    """``found``: what each test that did not pass says; ``ran``: the files that were run, all of them where
    ``complete``. Tests and files are named below the folder of the unit tests."""
    places = [
        place
        for each in reviewed
        if each.backend == backend and ranks in each.ranks
        for place in each.files or ("",)
    ]
    mine = [reason for reason in reasons if reason.is_for(backend, ranks)]
    explained: dict[str, Reason] = {}
    problems: list[str] = []
    used: set[tuple[Reason, str]] = set()
    for test, text in found.items():
        fits = {
            (reason, pattern)
            for reason in mine
            for pattern in reason.tests
            if reason.says in text and _matches(pattern, test)
        }
        used |= fits
        found_reasons = {reason for reason, _ in fits}
        if len(found_reasons) > 1:
            problems.append(
                f"{len(found_reasons)} reasons explain {test}: {sorted(r.evidence for r in found_reasons)}"
            )
        if found_reasons:
            explained[test] = min(found_reasons, key=lambda reason: reason.evidence)
    missing = [test for test in found if test not in explained]
    problems += [f"unexplained: {test}: {_line(found[test])}" for test in missing if _below(test, places)]
    files = set(ran)
    for reason in mine:
        for pattern in reason.tests:
            file = pattern.partition("::")[0]
            judged = (
                not reason.sometimes and (complete if "*" in file else file in files) and _below(file, places)
            )
            if judged and (reason, pattern) not in used:
                problems.append(f"stale: no test that does not pass is {pattern} and says {reason.says!r}")
    return Verdict(
        explained=explained,
        problems=problems,
        unreviewed=[test for test in missing if not _below(test, places)],
    )


def _matches(pattern: str, test: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), test, re.DOTALL) is not None


def _below(name: str, places: Sequence[str]) -> bool:
    """Whether ``name`` is one of the files, or below one of the folders."""
    return any(not place or re.match(rf"{re.escape(place)}($|/|::)", name) for place in places)


def _line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]

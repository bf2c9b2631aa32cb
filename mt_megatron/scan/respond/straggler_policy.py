"""What follows from a straggler, if it is wished: measure it, leave with a checkpoint, exclude its host.

Pure decisions, and one file: the list of excluded hosts, a hostfile whose comments say why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mt_megatron.errors import ConfigError
from mt_megatron.scan.findings.finding import SURE
from mt_megatron.scan.format.run_files import RunFiles, changing, write_private

from .confirm import MEASURABLE, Confirmation, Request, check_request

EXIT_CODE = 79
"""Of every process of a run that left because of a confirmed straggler; the launcher's as well."""

OnStraggler = Literal["continue", "checkpoint-and-exit"]

_SECONDS_BETWEEN = 60.0


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A host that the next start should do without."""

    host: str
    ranks: tuple[int, ...]
    cause: str
    reason: str
    """The measurement, in words."""


class StragglerPolicy:
    """Rank 0's decisions. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        hosts: Mapping[int, str],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hosts``: of every rank. ``say`` gets one line per decision."""
        self._hosts = dict(hosts)
        self._say = say
        self._now = now
        self._pending: tuple[Request, Mapping[str, Any]] | None = None
        self._tried: dict[tuple[int, ...], float] = {}
        self._told: set[tuple[str, tuple[int, ...]]] = set()
        self.leave: Exclusion | None = None
        """Set once: end the run with a checkpoint."""

    @property
    def request(self) -> Request | None:
        """What is to be measured now."""
        return None if self._pending is None else self._pending[0]

    def heard(self, finding: Mapping[str, Any]) -> None:
        """A finding as ``findings.jsonl`` holds it."""
        if self.leave is not None or self._pending is not None:
            return
        cause, ranks = str(finding.get("cause")), tuple(finding.get("ranks", ()))
        if not ranks or float(finding.get("confidence", 0.0)) < SURE:
            return
        obstacle = self._obstacle(cause, ranks)
        if obstacle is not None:
            if (cause, ranks) not in self._told:
                self._told.add((cause, ranks))
                self._say(f"{_name(cause, ranks)}: training goes on, because {obstacle}")
            return
        if self._now() - self._tried.get(ranks, float("-inf")) < _SECONDS_BETWEEN:
            return
        self._tried[ranks] = self._now()
        measured, suspects = MEASURABLE[cause], ranks
        if cause == "slow_node_link":
            suspects = self._across_the_border(ranks)
        request = Request(
            identity=f"straggler-{len(self._tried)}-{finding.get('named_at_step', '')}",
            what="compute" if measured == "compute" else "link",
            ranks=suspects,
        )
        try:
            check_request(request, len(self._hosts))
        except ConfigError as error:
            # All ranks would raise it between two steps.
            self._say(f"{_name(cause, ranks)}: training goes on, because it cannot be measured: {error}")
            return
        self._pending = (request, finding)
        self._say(f"{_name(cause, ranks)}: measured after this step")

    def not_measured(self) -> None:
        """What was to be measured could not be."""
        self._pending = None

    def measured(self, result: Confirmation) -> None:
        """What the measurement gave."""
        if self._pending is None or result.identity != self._pending[0].identity:
            return
        finding = self._pending[1]
        self._pending = None
        cause, ranks = str(finding["cause"]), tuple(finding["ranks"])
        if result.verdict != "confirmed":
            self._say(f"{_name(cause, ranks)} is not confirmed: training goes on")
            return
        host = self._hosts[ranks[0]]
        self.leave = Exclusion(host=host, ranks=ranks, cause=cause, reason=result.text)
        name = _name(cause, ranks)
        self._say(f"{name} on {host} is confirmed: the run saves and ends with code {EXIT_CODE}")

    def _obstacle(self, cause: str, ranks: tuple[int, ...]) -> str | None:
        hosts = {self._hosts.get(rank) for rank in ranks}
        if cause not in MEASURABLE:
            return "nothing that can be measured between two steps would confirm it"
        if len(hosts) != 1 or None in hosts:
            return f"it is not one host's ({', '.join(sorted(map(str, hosts)))})"
        if set(self._hosts.values()) == hosts:
            return f"without {hosts.pop()} no host would be left"
        if cause == "slow_node_link" and len(set(self._hosts.values())) == 2:
            # All pairs between two hosts share the suspect's network card: none shows the usual speed.
            return "of two hosts all pairs between them cross its border: no other is there to compare with"
        return None

    def _across_the_border(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """One pair with an end on each side of the node's border."""
        own = ranks[0]
        other = next(rank for rank, host in sorted(self._hosts.items()) if host != self._hosts[own])
        return (own, other)


def _name(cause: str, ranks: tuple[int, ...]) -> str:
    return f"{cause} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def excluded_path(files: RunFiles) -> Path:
    """Where the excluded hosts of a run are listed."""
    return files.root / "excluded-hosts"


def exclude(files: RunFiles, exclusion: Exclusion) -> Path:
    """Add a host to the run's list, which ``mt-megatron launch --exclude-hosts`` reads; returns its path.

    One that is listed already (nobody excluded it) is listed anew, with the later reason.
    """
    path = excluded_path(files)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    why = " ".join(exclusion.reason.split()).replace("#", "")
    line = f"{exclusion.host}  # {when} {_name(exclusion.cause, exclusion.ranks)}: {why}\n"
    with changing(path):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        others = [each for each in before.splitlines() if each.partition("#")[0].strip() != exclusion.host]
        write_private(path, "".join(f"{other}\n" for other in others) + line)
    return path

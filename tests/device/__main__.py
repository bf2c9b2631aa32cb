"""``python -m tests.device BACKEND``: look for the device, run the sections, write the report."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mt_megatron.backends import registry
from mt_megatron.cli.doctor.host import versions
from mt_megatron.errors import BackendError
from tests.device import report
from tests.device.result import Result
from tests.launch import RankError, run_ranks
from tests.soak import machine

ROOT = Path(__file__).resolve().parent.parent.parent
SECTIONS = ("device", "training", "watching", "collectives", "parity", "gate", "timing")
CPU_RANKS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all passed. 1: something failed. 2: no device, or wrong use."""
    parser = argparse.ArgumentParser(prog="bash tests/device/run.sh", description=__doc__)
    parser.add_argument("backend", choices=("cuda", "musa", "cpu"))
    parser.add_argument("--devices", type=int, default=None)
    parser.add_argument("--only", action="append", choices=SECTIONS, default=None)
    parser.add_argument("--output", type=Path, default=ROOT / "results")
    chosen = parser.parse_args(arguments)
    try:
        backend = registry.get(chosen.backend)
    except BackendError as error:
        return _nothing(str(error))
    usable, why = backend.available()
    if not usable:
        return _nothing(f"looked for {chosen.backend}: {why}")
    devices = chosen.devices or (CPU_RANKS if chosen.backend == "cpu" else backend.device_count())
    if devices < 1:
        return _nothing(f"looked for {chosen.backend}: found {devices} devices")
    now = datetime.datetime.now(datetime.timezone.utc).astimezone()
    facts = _facts(chosen.backend, f"{why}: {backend.device_name(0)}", devices)
    for name, value in facts.items():
        print(f"{name}: {value}", flush=True)
    results: list[Result] = []
    path = report.new_path(chosen.output, chosen.backend, now)
    sections = list(chosen.only or SECTIONS)

    def note_down() -> None:
        # A run that a time limit ends keeps the sections that were done.
        so_far = {**facts, "unfinished": f"not run yet: {', '.join(sections)}"} if sections else facts
        report.write(path, report.as_text(chosen.backend, so_far, results, now))

    note_down()
    while sections:
        found = _SECTIONS[sections[0]](chosen.backend, devices)
        results += found
        for result in found:
            if result.outcome == "failed":
                print(result.reason.strip().splitlines()[-1])
            print(f"{result.outcome:8s} {result.section}: {result.name}", flush=True)
        del sections[0]
        note_down()
    failed = sum(result.outcome == "failed" for result in results)
    print(f"{len(results)} checks, {failed} failed; the report is {path}")
    return 1 if failed else 0


def _nothing(what: str) -> int:
    print(f"error: {what}. Nothing was run", file=sys.stderr)
    return 2


def _facts(name: str, why: str, devices: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"found": why, "devices used": devices}
    if name == "cpu":
        facts["note"] = "the cpu backend is the reference itself: this run shows the report, not a device"
    emulated = _emulated(name)
    if emulated:
        facts["note"] = (
            f"EMULATED: torch_musa is the stand-in at {emulated}, no Moore Threads GPU was involved"
        )
    facts["host"] = machine()
    facts["versions"] = {key: value for key, value in versions().items() if value is not None}
    settings = ("CUDA_", "NCCL_", "MUSA_", "MCCL_", "PYTORCH_", "TORCH_NCCL_")
    facts["environment"] = {
        key: value for key, value in sorted(os.environ.items()) if key.startswith(settings)
    }
    return facts


def _emulated(name: str) -> str:
    if name != "musa":
        return ""
    import torch_musa

    path = str(Path(torch_musa.__file__).resolve().parent)
    return path if path.startswith(str(ROOT)) else ""


def _in_a_process(section: str, target: str, world: int, backend: str, *arguments: Any) -> list[Result]:
    try:
        ranks = run_ranks(
            world,
            target,
            *arguments,
            timeout=900,
            env={**_environment(backend), "MT_MEGATRON_TEST_BACKEND": backend},
        )
    except RankError as error:
        return [
            Result(section=section, name=f"{target} on {world} ranks", outcome="failed", reason=str(error))
        ]
    worst: dict[str, Result] = {}
    for rank in ranks:
        for entry in rank:
            result = Result(**entry)
            # A check of several ranks is as good as the rank that did worst.
            if result.name not in worst or result.outcome == "failed":
                worst[result.name] = result
    return list(worst.values())


def _environment(backend: str) -> dict[str, str]:
    if _emulated(backend):
        from tests.emulators import environment

        return environment()
    return {}


def _device(backend: str, devices: int) -> list[Result]:
    return _in_a_process("device", "tests.device.one_device:run", 1, backend)


def _training(backend: str, devices: int) -> list[Result]:
    return _in_a_process("training", "tests.device.training:run", 1, backend)


def _watching(backend: str, devices: int) -> list[Result]:
    from tests.device.watching import results

    return results(backend, devices, _environment(backend))


def _collectives(backend: str, devices: int) -> list[Result]:
    if devices < 2:
        reason = "needs 2 devices and 1 is used"
        return [Result(section="collectives", name="all", outcome="skipped", reason=reason)]
    found: list[Result] = []
    for world in sorted({2, min(devices, 8)}):
        found += _in_a_process("collectives", "tests.device.collectives:run", world, backend)
    return found


def _parity(backend: str, devices: int) -> list[Result]:
    from tests.device.parity import Suite

    bf16 = registry.get(backend).bf16_supported()
    return Suite(backend, devices, _environment(backend)).results(bf16)


def _gate(backend: str, devices: int) -> list[Result]:
    from tests.device.gate import results

    return results(backend, devices, _environment(backend))


def _timing(backend: str, devices: int) -> list[Result]:
    large = backend != "cpu" and not _emulated(backend)
    return _in_a_process("timing", "tests.device.timing:run", 1, backend, large)


_SECTIONS: dict[str, Callable[[str, int], list[Result]]] = {
    "device": _device,
    "training": _training,
    "watching": _watching,
    "collectives": _collectives,
    "parity": _parity,
    "gate": _gate,
    "timing": _timing,
}

if __name__ == "__main__":
    sys.exit(main())

"""``mt-megatron doctor``: what this machine has, what would run, what would not, and why.

Made to be pasted into a bug report. It imports neither torch nor megatron itself: processes of
their own do, so that a broken installation is reported instead of ending the report.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import mt_megatron
from mt_megatron._session import untested_versions
from mt_megatron.cli.doctor import cards, host
from mt_megatron.cli.doctor.probe import MARKER, PARTS
from mt_megatron.cli.doctor.text import text

_TIMEOUT = 180.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        description="Say whether this machine can train and what is wrong; then versions, devices,\n"
        "collectives, listeners and the state of the patches.\n"
        "Exit code 0: nothing is wrong. 1: a problem was found.",
        epilog="example:\n  mt-megatron doctor\n  mt-megatron doctor --json > report.json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when it names no problem, else 1."""
    if args.json:
        report = make_report()
        print(json.dumps(report, indent=2))
    else:
        print(
            f"mt_megatron {mt_megatron.__version__}: looking at the machine, then torch, which takes", end=""
        )
        print(" seconds to import:", end="", flush=True)
        report = make_report(lambda part: print(f" {part}", end="", flush=True))
        print(f"\n\n{text(report)}")
    return 1 if report["problems"] else 0


def make_report(looked_at: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """The report as plain data; ``problems`` and ``warnings`` hold one line each. ``looked_at`` gets the
    name of each part when it is known."""
    versions, system, megatron = host.versions(), host.system(), host.megatron_core()
    looked_at("machine")
    probe = _probe(looked_at)
    patches = probe["patches"]
    report: dict[str, Any] = {
        "mt_megatron": mt_megatron.__version__,
        "versions": versions,
        "system": system,
        "megatron_core": megatron,
        "torch": probe["torch_facts"],
        "backends": probe["backend_facts"],
        "auto": probe["selected"],
        "cards": _cards(probe["backend_facts"], looked_at),
        "network": host.network(),
        "patches": patches,
        "environment": host.environment(),
    }
    report["would_run"] = _would_run(report)
    report["problems"] = [
        *host.platform_problems(system),
        *host.version_problems(versions),
        *host.megatron_problems(megatron),
        *_probe_problems(probe),
        *_patch_problems(patches),
    ]
    report["warnings"] = _warnings(report)
    return report


def _run(arguments: Sequence[str]) -> tuple[int | None, str, str]:
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {_TIMEOUT:.0f} s"
    return done.returncode, done.stdout, done.stderr


def _ending(code: int | None, stderr: str) -> str:
    last = [line for line in stderr.strip().splitlines() if line.strip()][-1:]
    how = "no answer" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}: {last[0].strip() if last else 'nothing on stderr'}"


def _probe(looked_at: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "mt_megatron.cli.doctor.probe"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(_TIMEOUT, give_up)
        timer.start()
        with process:
            for line in process.stdout or ():
                if line.startswith(MARKER):
                    part, facts = json.loads(line[len(MARKER) :])
                    found[part] = facts
                    looked_at(PARTS[part])
        timer.cancel()
        errors.seek(0)
        code = None if late.is_set() else process.returncode
        said = f"no answer within {_TIMEOUT:.0f} s" if late.is_set() else errors.read()
    ended = f"a process that imports torch ended with {_ending(code, said)}"
    for part in PARTS:
        found.setdefault(part, {"ok": False, "error": ended} if part == "patches" else {"error": ended})
    return found


def _cards(backends: dict[str, Any], looked_at: Callable[[str], None]) -> list[dict[str, Any]]:
    code, stdout, stderr = _run(["-m", "mt_megatron.cli.doctor.cards"])
    looked_at("cards")
    _, marker, payload = stdout.partition(cards.MARKER + "\n")
    if code != 0 or not marker:
        reason = f"a process that loads the driver libraries ended with {_ending(code, stderr)}"
        seen: dict[str, Any] = {"mtml": [], "nvml": [], "mtml_reason": reason, "nvml_reason": reason}
        seen["pci"] = cards.pci_devices()
    else:
        seen = json.loads(payload)
    return cards.describe(seen, {} if "error" in backends else backends)


def _probe_problems(probe: dict[str, Any]) -> list[str]:
    parts = {"torch_facts": "torch", "backend_facts": "the backends", "selected": "the choice of a backend"}
    problems = [
        f"{subject} could not be examined: {probe[part]['error']}"
        for part, subject in parts.items()
        if "error" in probe[part]
    ]
    # The three usually fail for one reason; saying it three times helps nobody.
    return problems[:1]


def _patch_problems(patches: dict[str, Any]) -> list[str]:
    return [patches["error"]] if "error" in patches else list(patches["problems"])


def _would_run(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    backends = {} if "error" in report["backends"] else report["backends"]
    blocked = ""
    if report["megatron_core"]["path"] is None:
        blocked = "megatron.core cannot be found"
    elif not report["patches"]["ok"]:
        blocked = "the patches do not fit what is installed"
    for name, facts in backends.items():
        found[f"training on {name}"] = {
            "works": facts["available"] and not blocked,
            "why": blocked if facts["available"] and blocked else facts["why"],
        }
    usable = [name for name in backends if found[f"training on {name}"]["works"]]
    flags = report["system"]["cpu_flags"]
    native = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    if "cpu" in usable:
        found["bf16 on cpu"] = {
            "works": True,
            "why": f"native ({', '.join(native)})" if native else "without instructions for it: slow",
        }
    found["tensor, sequence, context, pipeline, interleaved and data parallelism"] = {
        "works": bool(usable),
        "why": f"on {', '.join(usable)}" if usable else "no backend can be used",
    }
    found["fp8"] = {
        "works": False,
        "why": "megatron-core 0.9.0 has it only with Transformer Engine, which this version does not use",
    }
    return found


def _warnings(report: dict[str, Any]) -> list[str]:
    warnings = []
    for name in ("transformer-engine", "apex"):
        if report["versions"][name] is not None:
            warnings.append(f"{name} {report['versions'][name]} is installed; this version does not use it")
    namespace = report["megatron_core"]["namespace"]
    if len(namespace) > 1:
        warnings.append(
            f"several directories make up the package megatron ({', '.join(namespace)}): a Megatron-LM "
            "checkout on the path can take the place of the installed megatron.core"
        )
    shared = report["system"]["shared_memory_free_bytes"]
    if shared is not None and shared < 256 * 2**20:
        warnings.append(
            f"/dev/shm has {shared / 2**20:.0f} MiB free: data loader workers may run out of it; use "
            "--num-workers 0 or give the container more (--shm-size)"
        )
    if report["versions"]["packaging"] is not None:
        warnings.extend(untested_versions())
    return warnings

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
from mt_megatron.fp8.recipe import possible_recipes

# The report for people: the verdict first, then the facts behind it.


def text(report: dict[str, Any]) -> str:
    """The report for people, in plain lines."""
    versions, system = report["versions"], report["system"]
    lines = [verdict(report)]
    for kind in ("problems", "warnings"):
        if report[kind]:
            lines += ["", f"{kind}:", *(f"  - {each}" for each in report[kind])]
    lines += ["", "would run"]
    lines += [
        f"  {'yes' if each['works'] else 'no ':<4}{name}: {each['why']}"
        for name, each in report["would_run"].items()
    ]
    lines += ["", "versions"]
    lines += [f"  {name:<22}{value}" for name, value in versions.items() if value is not None]
    absent = [name for name, value in versions.items() if value is None]
    lines.append(f"  {'not installed':<22}{', '.join(absent)}" if absent else "  everything is installed")
    lines += ["", "machine"]
    lines.append(
        f"  {'os':<22}{system['os']} {system['release']} {system['machine']} {system['libc'] or ''}".rstrip()
    )
    lines.append(f"  {'processor':<22}{system['cpu']} ({', '.join(system['cpu_flags']) or 'no known flags'})")
    lines.append(f"  {'cores':<22}{system['cores']}, {system['cores_allowed']} allowed")
    lines.append(
        f"  {'memory':<22}{_size(system['memory_bytes'])}, {_size(system['memory_available_bytes'])} free"
    )
    lines.append(f"  {'/dev/shm':<22}{_size(system['shared_memory_free_bytes'])} free")
    lines.append(f"  {'open files':<22}{system['open_files'] or 'no limit'}")
    lines += ["", "megatron.core", f"  {'path':<22}{report['megatron_core']['path']}"]
    lines.append(f"  {'dataset helper':<22}{report['megatron_core']['dataset_helper']}")
    lines += ["", "torch", *_facts(report["torch"])]
    lines += ["", "backends"]
    if "error" in report["backends"]:
        lines.append(f"  {report['backends']['error']}")
    else:
        for name, facts in report["backends"].items():
            state = "yes" if facts["available"] else "no"
            devices = f"; {len(facts['devices'])} x {facts['devices'][0]}" if facts["devices"] else ""
            lines.append(f"  {name:<22}{state}: {facts['why']}{devices}")
    lines.append(f"  {'auto takes':<22}{report['auto'].get('name', report['auto'].get('error'))}")
    lines += ["", "cards"]
    lines += [
        f"  {each['name']} ({each['found_by']}): {'; '.join(each['can'])}" for each in report["cards"]
    ] or ["  no NVIDIA or Moore Threads card was found"]
    lines += ["", "channels between pipeline stages"]
    if "error" in report["channels"]:
        lines.append(f"  {report['channels']['error']}")
    else:
        for name, each in report["channels"].items():
            lines.append(f"  {name:<22}{'yes' if each['works'] else 'no'}: {each['why']}")
    network = report["network"]
    lines += ["", "network"]
    lines.append(f"  {'loopback':<22}{network['loopback_interface']}")
    lines.append(f"  {'host name is':<22}{network['hostname_address'] or 'not resolvable'}")
    lines.append(f"  {'GLOO_SOCKET_IFNAME':<22}{network['GLOO_SOCKET_IFNAME'] or 'not set'}")
    lines += [f"  - {each}" for each in network["listeners"]]
    lines += ["", "patches", _patch_line(report["patches"])]
    if report["environment"]:
        lines += ["", "environment", *(f"  {name}={value}" for name, value in report["environment"].items())]
    return "\n".join(lines)


def verdict(report: dict[str, Any]) -> str:
    """Whether this machine can train, on what, and how many problems and warnings there are."""
    kind = "training on "
    usable = [
        name.removeprefix(kind)
        for name, each in report["would_run"].items()
        if name.startswith(kind) and each["works"]
    ]
    # The one that --backend auto takes comes first.
    usable.sort(key=lambda name: name != report["auto"].get("name"))
    can = f"can train on {', '.join(usable)}" if usable else "cannot train here"
    found = f"Problems: {len(report['problems']) or 'none'}."
    if report["warnings"]:
        found += f" Warnings: {len(report['warnings'])}."
    return f"{'OK' if usable and not report['problems'] else 'NOT OK'}: {can}. {found}"


def _patch_line(patches: dict[str, Any]) -> str:
    if not patches["ok"]:
        return "  do not fit what is installed: see the problems below"
    return (
        f"  {patches['applicable']} for {patches['backend']} fit what is installed, "
        f"{patches['left_out']} left out; plan {patches['plan_digest'][:12]}"
    )


def _facts(facts: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in facts.items():
        shown = (
            ", ".join(f"{k} {'yes' if v else 'no'}" for k, v in value.items())
            if isinstance(value, dict)
            else value
        )
        lines.append(f"  {name:<22}{shown}")
    return lines


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


# The subcommand.

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
        "channels": probe["channels"],
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
    without = "without instructions for it: slow"
    if "avx512f" not in flags:
        without += "; faster with --cpu-bf16-products fp32"
    if "cpu" in usable:
        found["bf16 on cpu"] = {
            "works": True,
            "why": f"native ({', '.join(native)})" if native else without,
        }
    found["tensor, sequence, context, pipeline, interleaved and data parallelism"] = {
        "works": bool(usable),
        "why": f"on {', '.join(usable)}" if usable else "no backend can be used",
    }
    present = report["torch"].get("fp8_libraries", {})
    found["fp8"] = {"works": bool(usable), "why": _fp8_text(backends, usable, present)}
    return found


def _fp8_text(backends: dict[str, Any], usable: list[str], present: dict[str, bool]) -> str:
    """Recipes that each usable backend trains with, and which libraries are present."""
    parts = []
    for name in usable:
        recipes = possible_recipes(name, tuple(backends[name].get("fp8", ())))
        how = "emulated, exactly and slower than bf16" if name == "cpu" else "by torch._scaled_mm"
        parts.append(f"{name}: {', '.join(recipes)} ({how})" if recipes else f"{name}: no recipe")
    if not parts:
        return "no backend can be used"
    for name, what in (
        ("deep_gemm", "blockwise on cuda with --fp8-backend deep_gemm"),
        ("transformer_engine", "upstream's own FP8 with --transformer-impl transformer_engine"),
    ):
        parts.append(f"{name} is installed ({what})" if present.get(name) else f"{name} is not installed")
    if not present.get("torch._scaled_grouped_mm"):
        parts.append("this torch has no torch._scaled_grouped_mm: experts one by one")
    return "; ".join(parts)


def _warnings(report: dict[str, Any]) -> list[str]:
    warnings = []
    for name, used in (
        ("transformer-engine", "on CUDA its layers are used (--transformer-impl auto), and its FusedAdam"),
        ("apex", "its FusedAdam is used"),
    ):
        if report["versions"][name] is not None:
            warnings.append(f"{name} {report['versions'][name]} is installed: {used}")
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

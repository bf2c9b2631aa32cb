"""The report of ``doctor`` for people: the verdict first, then what it rests on."""

from __future__ import annotations

from typing import Any


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

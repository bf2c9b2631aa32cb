"""``mt-megatron patches``: what would be changed in Megatron, why, and whether it fits what is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_megatron import _session
from mt_megatron.errors import MtMegatronError, PatchError
from mt_megatron.host import limits

if TYPE_CHECKING:
    from mt_megatron.backends.base import Backend
    from mt_megatron.patching.spec import Patch

_CODES = "exit codes: 0 fine, 1 a patch does not fit what is installed, 2 wrong use"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "patches",
        description="Show the declared changes to Megatron-Core. Nothing is applied, and Megatron is not "
        "imported.",
        epilog="examples:\n  mt-megatron patches list\n  mt-megatron patches explain device.torch\n"
        f"  mt-megatron patches check --backend cpu --json\n\n{_CODES}",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    one = _action(actions, "list", "every patch, and whether it would be applied", "list --filter rope")
    one.add_argument("--errata", action="store_true", help="mended defects of Megatron-Core alone")
    one.add_argument("--filter", default="", metavar="WORD", help="only patches that mention it")
    one.add_argument("--json", action="store_true", help="print one JSON array")
    one = _action(actions, "explain", "all about one patch", "explain device.torch")
    one.add_argument("id", metavar="ID", help="as 'list' shows it")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one = _action(actions, "check", "compare with the installed sources and versions", "check --json")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one = _action(
        actions, "record", "rewrite the line hashes that name drifted lines", "record", backend=False
    )
    parser.set_defaults(func=run)
    return parser


def _action(
    actions: Any, name: str, text: str, example: str, *, backend: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text, epilog=f"example:\n  mt-megatron patches {example}\n\n{_CODES}"
    )
    if backend:
        shown = "" if name == "check" else ", its device need not be here"
        parser.add_argument("--backend", default="auto", help=f"for which backend{shown} (default: auto)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do what was asked; returns the exit code."""
    actions = {"list": _list, "explain": _explain, "check": _check, "record": _record}
    return actions[args.action](args)


def _declared(name: str, *, here: bool = False) -> tuple[Backend, str, list[Patch]]:
    from mt_megatron.backends.registry import get, select
    from mt_megatron.patches import collect

    if name == "auto" or here:
        backend, why = select(name)
    else:
        backend, why = get(name), f"{name} was asked for: as where its device is"
    return backend, why, collect(backend)


def _list(args: argparse.Namespace) -> int:
    from mt_megatron.patching.plan import select_patches

    found = _without_torch(args.backend)
    if found is None:
        backend, why, patches = _declared(args.backend)
        found = backend.name, why, patches
    name, why, patches = found
    if args.errata:
        patches = [patch for patch in patches if patch.feature == "errata"]
    _, left_out = select_patches(patches, name, None)
    reasons = {patch.id: reason for patch, reason in left_out}
    patches = [patch for patch in patches if args.filter.lower() in _text(patch)]
    if not patches:
        print(
            f"no patch of backend {name!r} mentions {args.filter!r}; 'patches list' shows all",
            file=sys.stderr,
        )
        return 2
    reasons = {patch.id: reasons[patch.id] for patch in patches if patch.id in reasons}
    if args.json:
        print(json.dumps([_as_data(patch, reasons.get(patch.id)) for patch in patches], indent=2))
        return 0
    features = dict.fromkeys(patch.feature for patch in patches)
    lines = [
        f"backend {name} ({why}): {len(patches) - len(reasons)} of {len(patches)} patches apply, "
        f"{len(features)} feature{'s' * (len(features) != 1)}",
        "'+' applies, '-' is left out; 'mt-megatron patches explain ID' shows one with its source",
    ]
    for feature in features:
        members = [patch for patch in patches if patch.feature == feature]
        applied = sum(patch.id not in reasons for patch in members)
        lines += ["", f"{feature} ({applied} of {len(members)} apply)"]
        for patch in members:
            left = f" [left out: {reasons[patch.id]}]" if patch.id in reasons else ""
            lines.append(f"  {'-' if left else '+'} {patch.id:<44} {patch.kind:<9} {patch.target}")
            lines.append(f"      {patch.reason}{left}")
    _page("\n".join(lines))
    return 0


def _text(patch: Patch) -> str:
    return " ".join((patch.id, patch.target, patch.kind, patch.feature, patch.reason)).lower()


def _without_torch(asked: str) -> tuple[str, str, list[Patch]] | None:
    """Name, reason and patches of the backend where they are known without torch: the cpu's, of a torch
    that was built for no accelerator. None: look at the machine."""
    from mt_megatron.backends import registry
    from mt_megatron.patches import catalogue

    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or asked not in ("auto", "cpu"):
        return None
    if asked == "cpu":
        why = f"cpu was asked for: {limits.processors()} processors, Gloo"
    else:
        built = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
        for_cuda = re.search(r"^cuda\b.*= None$", built, re.MULTILINE) is None
        if for_cuda or importlib.util.find_spec("torch_musa") or registry.names() != ["cpu", "cuda", "musa"]:
            return None
        missing = "cuda: this torch was built without CUDA; musa: torch_musa is not installed"
        why = f"auto: no accelerator ({missing})"
    patches = catalogue.recorded("cpu")
    return None if patches is None else ("cpu", why, patches)


def _page(text: str) -> None:
    """Print ``text``, on a terminal through its pager."""
    if sys.stdout.isatty():
        import pydoc

        os.environ.setdefault("LESS", "-FRX")
        pydoc.pager(text)
    else:
        print(text)


def _explain(args: argparse.Namespace) -> int:
    from mt_megatron.patching.digest import source_of
    from mt_megatron.patching.plan import select_patches, suggest

    backend, _, patches = _declared(args.backend)
    patch = next((patch for patch in patches if patch.id == args.id), None)
    if patch is None:
        near = [each.id for each in patches if args.id.lower() in _text(each)][:3]
        hint = f"; mentioned by {', '.join(near)}" if near else ""
        hint = suggest(args.id, [patch.id for patch in patches]) or hint
        features = ", ".join(dict.fromkeys(patch.feature for patch in patches))
        print(
            f"no patch of backend {backend.name!r} has the id {args.id!r}{hint}; "
            f"'patches list --filter WORD' shows those that mention a word, such as a feature: {features}",
            file=sys.stderr,
        )
        return 2
    _, left_out = select_patches(patches, backend.name, None)
    data = _as_data(patch, next((why for other, why in left_out if other is patch), None))
    try:
        source = source_of(patch.target)
        data["source"] = f"{source.path}:{source.first_line}-{source.last_line}"
        data["installed_digest"] = source.digest
    except PatchError as error:
        data["source"] = str(error)
    if args.json:
        print(json.dumps(data, indent=2))
        return 0
    for name, value in data.items():
        if value not in (None, [], {}, ""):
            print(f"{name:>17}: {value}")
    return 0


def _check(args: argparse.Namespace) -> int:
    result = examine(args.backend)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_check(result)
    return 0 if result["ok"] else 1


def examine(name: str) -> dict[str, Any]:
    """What ``check`` reports of the backend ``name``; ``problems`` names what does not fit."""
    from mt_megatron.patching.plan import find_problems

    result: dict[str, Any] = {"ok": False, "problems": []}
    try:
        backend, why, patches = _declared(name, here=True)
        _session.check_upstream_version()
        problems = find_problems(patches, backend=backend.name, settings=_session.settings())
        result |= {"backend": backend.name, "why": why, "warnings": list(_session.untested_versions())}
        result["problems"] = [_problem(error) for error in problems]
        if not problems:
            plan = _session.make_plan_for(backend, why)
            result |= {
                "ok": True,
                "warnings": list(plan.warnings),
                "plan_digest": plan.digest,
                "patches": [{"id": step.patch.id, "digest": step.digest} for step in plan.steps],
                "left_out": [{"id": patch.id, "why": reason} for patch, reason in plan.left_out],
            }
    except MtMegatronError as error:
        result["problems"] = [_problem(error)]
    return result


def _print_check(result: dict[str, Any]) -> None:
    for warning in result.get("warnings", []):
        print(f"warning: {warning}")
    for problem in result["problems"]:
        print(f"{problem['error']}: {problem['message']}")
    if result["ok"]:
        print(
            f"backend {result['backend']} ({result['why']}): {len(result['patches'])} patches fit what is "
            f"installed, {len(result['left_out'])} left out; plan {result['plan_digest'][:12]}"
        )
    else:
        print(f"{len(result['problems'])} problem(s) found")


def _record(args: argparse.Namespace) -> int:
    from mt_megatron.backends import registry
    from mt_megatron.patches import catalogue, collect
    from mt_megatron.patching.digest import source_of, write_fingerprints
    from mt_megatron.patching.source import exists

    _session.check_upstream_version()
    by_backend = {name: collect(registry.get(name)) for name in registry.names()}
    declared = [patch for found in by_backend.values() for patch in found]
    targets = {patch.target: patch for patch in declared if patch.digest}
    absent = {name for name, patch in targets.items() if patch.optional and not exists(patch.module)}
    sources = [source_of(target) for target in targets if target not in absent]
    stale = [source for source in sources if source.digest != targets[source.target].digest]
    for source in stale:
        print(
            f"patch {targets[source.target].id} states digest {targets[source.target].digest}, but "
            f"{source.target} has {source.digest}: look at the patch before changing it",
            file=sys.stderr,
        )
    if stale:
        return 1
    write_fingerprints(_session.FINGERPRINTS, sources, kept=absent)
    catalogue.write({"cpu": by_backend["cpu"]})
    print(f"{len(sources)} targets recorded in {_session.FINGERPRINTS}")
    return 0


def _problem(error: MtMegatronError) -> dict[str, str]:
    return {"error": type(error).__name__, "message": str(error)}


def _as_data(patch: Patch, left_out: str | None) -> dict[str, Any]:
    return {
        "id": patch.id,
        "target": patch.target,
        "kind": patch.kind,
        "reason": patch.reason,
        "feature": patch.feature,
        "state": "would be applied" if left_out is None else f"left out: {left_out}",
        "backends": None if patch.backends is None else sorted(patch.backends),
        "requires": dict(patch.requires),
        "after": list(patch.after),
        "scope": list(patch.scope),
        "digest": patch.digest,
    }

"""``mt-megatron scope control``: pause, step, resume, perturb a running training, generate with it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from mt_megatron.checkpoint.files import run_root
from mt_megatron.errors import ConfigError

_EXAMPLE = """examples:
  mt-megatron scope control RUN pause
  mt-megatron scope control RUN step 5
  mt-megatron scope control RUN generate --prompt "Once upon a time" --tokens 40
  mt-megatron scope control RUN preview lab.yaml
  mt-megatron scope control RUN arm lab.yaml --name flip
  mt-megatron scope control RUN undo
  mt-megatron scope control RUN pair lab.yaml
  mt-megatron scope control RUN resume

exit codes: 0 done, 1 the run refused it or did not answer, 2 wrong use"""

_ACTIONS = (
    "status",
    "pause",
    "step",
    "resume",
    "hold",
    "generate",
    "preview",
    "arm",
    "disarm",
    "undo",
    "pair",
)
_PATIENCE_S = 3.0
_OF_FILES = ("preview", "arm", "pair")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "control",
        help="pause, step, resume or perturb a run; generate with its weights",
        description="Command a training that runs with --scope record or live. It follows at the next step\n"
        "boundary, on all ranks; 'hold' keeps a pause from ending by itself. docs/33-scope-lab.md has the\n"
        "file of perturbations (PERTURBATIONS) that preview, arm and pair take.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument("do", metavar="DO", choices=_ACTIONS, help=", ".join(_ACTIONS))
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="?",
        help="step: how many; undo, disarm: ID; preview, arm, pair: the file",
    )
    parser.add_argument("--name", metavar="NAME", help="of the file's perturbations, this one alone")
    parser.add_argument("--prompt", metavar="TEXT", help="generate: what the text goes on from")
    parser.add_argument("--ids", metavar="N,N,...", help="generate: token ids instead of a prompt")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="generate: how many (32)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0: the most probable (1)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="of the K most probable; 0: all (0)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws (0)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds to wait for an answer (600)"
    )
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Leave the commands, wait for each answer and print it; returns the exit code."""
    folder = _folder(args.run)
    commands = _commands(args)
    code = 0
    for arguments in commands:
        code = max(code, _one(folder, args, arguments))
    return code


def _folder(path: Path) -> Path:
    from mt_megatron.scope.control.commands import is_listening
    from mt_megatron.scope.recording.files import scope_files

    folder = scope_files(run_root(path)).root
    if not is_listening(folder):
        raise ConfigError(
            f"found no {folder / 'commands'}; expected the folder of a run that trains with --scope record "
            "or live. Give the folder that its --save or --scope-dir names"
        )
    return folder


def _commands(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Arguments of each command."""
    if args.name is not None and args.do not in _OF_FILES:
        raise ConfigError(f"found --name for {args.do}; expected it beside a file. Give the ID by itself")
    if args.do == "step":
        try:
            return [{"n": int(args.what or "1")}]
        except ValueError:
            raise ConfigError(f"found {args.what!r} for step; expected a number of steps") from None
    if args.do == "generate":
        return [_generation(args)]
    if args.do in _OF_FILES:
        return _perturbations(args)
    if args.do in ("undo", "disarm"):
        if args.do == "disarm" and args.what is None:
            raise ConfigError("found no ID for disarm; expected the name of a perturbation (see status)")
        return [{} if args.what is None else {"id": args.what}]
    if args.what is not None:
        raise ConfigError(f"found {args.what!r} for {args.do}, which takes nothing; leave it out")
    return [{}]


def _generation(args: argparse.Namespace) -> dict[str, Any]:
    if (args.prompt is None) == (args.ids is None):
        raise ConfigError("found both or neither of --prompt and --ids; expected one of them for generate")
    given: dict[str, Any] = {
        "n": args.tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "seed": args.seed,
    }
    if args.prompt is not None:
        return {**given, "prompt": args.prompt}
    try:
        return {**given, "ids": [int(each) for each in args.ids.split(",")]}
    except ValueError:
        raise ConfigError(f"found --ids {args.ids}; expected whole numbers joined by ','") from None


def _perturbations(args: argparse.Namespace) -> list[dict[str, Any]]:
    from mt_megatron.scope.lab.specification import read_lab_file

    if args.what is None:
        raise ConfigError(f"found no file for {args.do}; expected the YAML file of perturbations")
    given = read_lab_file(args.what)
    found = [one for one in given.perturbations if args.name in (None, one.name)]
    if not found:
        raise ConfigError(f"found no perturbation named {args.name!r} in {args.what}")
    limit = given.snapshot_limit_mib
    common = {} if limit is None else {"snapshot_limit_mib": limit}
    return [{"perturbation": one.to_dict(), **common} for one in found]


def _one(folder: Path, args: argparse.Namespace, arguments: dict[str, Any]) -> int:
    from mt_megatron.scope.control.commands import answered, leave, take_back

    identity = leave(folder, args.do, arguments)
    began = time.monotonic()
    until, is_told = began + args.timeout, False
    try:
        while (answer := answered(folder, identity)) is None:
            if not is_told and time.monotonic() > began + _PATIENCE_S:
                print(
                    f"waiting for the run ('mt-megatron scope status {args.run}' says whether it has ended); "
                    "Ctrl-C takes the command back",
                    file=sys.stderr,
                )
                is_told = True
            if time.monotonic() > until:
                taken = not take_back(folder, identity)
                why = "it is in a long step" if taken else "is it running?"
                print(
                    f"mt-megatron scope control: no answer within {args.timeout:g} s; {why}", file=sys.stderr
                )
                return 1
            time.sleep(0.05)
    except KeyboardInterrupt:
        taken = not take_back(folder, identity)
        print("the run has it already" if taken else "taken back", file=sys.stderr)
        return 1
    if not answer.get("ok"):
        print(f"mt-megatron scope control: {answer.get('error')}", file=sys.stderr)
        return 1
    value = answer.get("value")
    print(json.dumps(value) if args.json else _text(args.do, value))
    return 0


def _text(do: str, value: Any) -> str:
    if not isinstance(value, dict):
        return "done"
    if do == "generate":
        return _generated(value)
    if do in ("preview", "arm"):
        return _previewed(do, value)
    if do == "pair":
        return _paired(value)
    if do == "undo":
        return f"undone: {', '.join(value['undone'])}; the run goes on from step {value['step']}"
    if do == "status":
        return _status(value)
    if "paused" in value:
        steps = f", for {value['steps_left']} step(s)" if value.get("steps_left") else ""
        return f"{'paused' if value['paused'] else 'goes on'} after step {value['step']}{steps}"
    return "done"


def _status(value: dict[str, Any]) -> str:
    lines = [f"step {value['step']}: {'paused' if value['paused'] else 'trains'}"]
    if value.get("steps_left"):
        lines.append(f"pauses after {value['steps_left']} more step(s)")
    if value.get("perturbed"):
        lines.append(f"perturbed by {value['perturbed']}")
    lines += [f"{each['id']} ({each['state']}): {each['text']}" for each in value["armed"]]
    return "\n".join(lines)


def _generated(value: dict[str, Any]) -> str:
    lines = [f"with the weights of step {value['step']}:", str(value["text"]), ""]
    for token in value["tokens"]:
        others = ", ".join(
            f"{identity} {probability:.3f}"
            for identity, probability in list(zip(token["top_ids"], token["top_probabilities"], strict=True))[
                :5
            ]
        )
        lines.append(
            f"{token['id']:>7} {token['text']!r:<16} p {token['probability']:.3f}, entropy "
            f"{token['entropy']:.2f} nats; {others}"
        )
    return "\n".join(lines)


def _previewed(do: str, value: dict[str, Any]) -> str:
    lines = [
        value["text"]
        if do == "preview"
        else f"{value['id']} acts from step {value['starts_at']}: {value['text']}"
    ]
    for target in value["targets"]:
        shape = "x".join(map(str, target["shape"])) if target["shape"] else "unknown shape"
        count = "" if target["elements"] is None else f", {target['elements']:,} element(s)"
        lines.append(f"  {target['path']} [{shape}]{count}, on rank {', '.join(map(str, target['ranks']))}")
    if value["snapshot_mib"]:
        lines.append(
            f"  snapshot: {value['snapshot_mib']:,.1f} MiB, "
            f"{value['snapshot_mib_of_a_rank']:,.1f} MiB a rank "
            f"of at most {value['limit_mib_of_a_rank']:,.0f}"
        )
    return "\n".join(lines)


def _paired(value: dict[str, Any]) -> str:
    lines = [f"step {value['step']}: {value['text']}"]
    for name in ("loss", "grad_norm"):
        before, after = value["baseline"][name], value["perturbed"][name]
        if before is not None and after is not None:
            lines.append(
                f"  {name}: {before:.6g} without, {after:.6g} with, difference {after - before:+.3g}"
            )
    left_out = value["outputs_left_out"]
    beside = f" ({left_out} outputs had no room in memory and were not compared)" if left_out else ""
    lines.append(f"  first module that differs: {value['first_difference'] or 'none'}{beside}")
    for each in value["modules"]:
        share, relative = each["changed_share"], each["relative_difference"]
        if share is None:
            lines.append(f"  {each['path']:<44} not comparable")
            continue
        shown = "-" if relative is None or math.isnan(relative) else f"{relative:.3g}"
        lines.append(f"  {each['path']:<44} {100 * share:6.2f} % changed, relative {shown}")
    return "\n".join(lines)

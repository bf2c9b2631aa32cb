"""The ranks' side of the tests of what is loaded, refused or given up."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mt_megatron.checkpoint import files
from tests.training.loop_cases import run, start

PLAIN = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0"
LAYOUTS = {
    "dp2": "",
    "tp2": "--tensor-model-parallel-size 2",
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "vpp2": "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
}


def flip(path: Path, position: int) -> None:
    """Change one bit of one byte; a second time brings it back."""
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 0x10
    path.write_bytes(content)


def damaged(folder: str) -> dict[str, Any]:
    """Continue from a folder in which one byte of the newest checkpoint is flipped, file by file."""
    start()
    save = Path(folder) / "saved"
    flags = f"{PLAIN} --use-distributed-optimizer --save {save}"
    run(f"{flags} --train-iters 4 --save-interval 2", folder, "first")
    newest = save / "iter_0000004"
    names = sorted(str(each.relative_to(newest)) for each in newest.rglob("*") if each.is_file())
    found: dict[str, Any] = {"names": names, "errors": {}}
    for name in names:
        _on_main(partial(flip, newest / name, 1000003))
        found["errors"][name] = run(flags, folder, "refused")["error"]
        _on_main(partial(flip, newest / name, 1000003))
    # A number in the tensors' own bytes, which nothing but a checksum would notice.
    _on_main(lambda: flip(newest / "__0_0.distcp", 5000))
    found["weights"] = run(f"{flags} --resume {newest}", folder, "weights")["error"]
    found["unverified"] = run(
        f"{flags} --resume {newest} --no-verify-checkpoint --save {save}_unverified", folder, "unverified"
    )
    found["skipped"] = run(f"{flags} --resume-skip-damaged", folder, "skipped")
    _on_main(lambda: [flip(each / "common.pt", 5) for each in files.complete_checkpoints(save)])
    found["none"] = run(f"{flags} --resume-skip-damaged", folder, "none")["error"]
    return found


def full_disk(folder: str) -> dict[str, Any]:
    """One rank's files may not grow beyond a few pages, for a while; then at the end."""
    start()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    found = {}
    for name, flags, bad in (("middle", "--async-save", {4}), ("end", "", {6})):
        stop = _limit_during_saves(bad, limits)
        found[name] = run(
            f"{PLAIN} --save {folder}/{name} --save-interval 2 --train-iters 6 {flags}", folder, name
        )
        stop()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


def _limit_during_saves(bad: set[int], limits: tuple[int, int]) -> Callable[[], None]:
    from mt_megatron.seams import events

    if dist.get_rank() != 1:
        return lambda: None

    def listen(phase: str, name: str, attrs: Any) -> None:
        if name == "checkpoint" and phase == "begin":
            size = 4096 if attrs["iteration"] in bad else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    return events.subscribe(listen)


def moved(folder: str, source: str, targets: list[str], optimizer: str) -> dict[str, Any]:
    """Three steps under the source layout, then the fourth under every target."""
    start()
    saved, flags = f"{folder}/saved", f"{PLAIN} {optimizer}"
    run(f"{flags} {LAYOUTS[source]} --save {saved} --exit-interval 3", folder, "first")
    return {
        target: run(f"{flags} {LAYOUTS[target]} --resume {saved} --exit-interval 4", folder, target)
        for target in targets
    }


def continued(folder: str, optimizer: str) -> dict[str, Any]:
    """The fourth step in as many processes as there are."""
    start()
    return run(f"{PLAIN} {optimizer} --resume {folder}/saved --exit-interval 4", folder, "continued")


def stored_configuration(folder: str) -> dict[str, Any]:
    """A run continued from the configuration that lies beside its checkpoint."""
    import yaml

    from mt_megatron.config.parse import load_config

    start()
    run(f"{PLAIN} --save {folder}/saved --async-save --save-keep-last 3 --train-iters 2", folder, "first")
    beside = Path(folder) / "saved" / "iter_0000002"
    text = (beside / "config.yaml").read_text()
    again = load_config(["--config", str(beside / "config.yaml")])
    document = files.read_manifest(beside)
    # One is due after every step, so each waits for the one before.
    kept = "--train-iters 7 --save-interval 1 --save-keep-last 2 --save-retain-interval 3 --async-save"
    run(f"{PLAIN} --save {folder}/kept {kept}", folder, "kept")
    other = run(f"{PLAIN} --save {folder}/kept --use-distributed-optimizer", folder, "other")
    return {
        "refused": other["error"],
        "kept": [each.name for each in files.complete_checkpoints(Path(folder) / "kept")],
        "same": again.to_dict() == yaml.safe_load(text) == document["config"],
        "manifest": {key: document[key] for key in ("progress", "layout", "versions", "format", "tokenizer")},
        "patches": len(document["patches"]),
        "listed": sorted(document["files"]),
        "there": sorted(str(each.relative_to(beside)) for each in beside.rglob("*") if each.is_file()),
    }


def _on_main(action: Any) -> None:
    if os.environ["RANK"] == "0":
        action()
    dist.barrier()

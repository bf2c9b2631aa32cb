"""One rank of the training that ``cost.py`` watches and does not watch in turn."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scan"))

from scan_cost_held import Cores  # noqa: E402
from scan_cost_worker import SHAPE as BF16_SHAPE  # noqa: E402
from scan_cost_worker import _agreed as agreed  # noqa: E402
from scan_cost_worker import pilot, together  # noqa: E402
from throughput_sides import Ours, token_ids  # noqa: E402

SHAPE = replace(BF16_SHAPE, dtype=torch.float32)
"""In fp32: many processors have no bf16 arithmetic and take seconds a step."""

INTERVAL = 20
_LIVE = 7
"""Steps of this number show attention."""

ARMS = {
    "off again": (None, None),
    "unsampled": (1, 1),
    "sampled": (INTERVAL, 1),
    "attention": (_LIVE, _LIVE),
}
"""What the session is told the numbers of a block's steps are; None: it is told of none."""

ROUND = ("off again", "unsampled", "unsampled", "sampled", "attention")
_WARM_UP_ROUNDS = 2
_SETTLE_SECONDS = 0.002
_ZERO = "--use-distributed-optimizer"

_DRAIN = """
import os, selectors, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.bind(sys.argv[1])
server.listen(64)
ready = selectors.DefaultSelector()
ready.register(server, selectors.EVENT_READ)
while os.getppid() == int(sys.argv[2]):
    for key, _ in ready.select(1.0):
        if key.fileobj is server:
            ready.register(server.accept()[0], selectors.EVENT_READ)
        elif not key.fileobj.recv(1 << 20):
            ready.unregister(key.fileobj)
            key.fileobj.close()
"""


class Drain:
    """Takes what ranks send and does nothing with it: in a real job the sidecar has a core of its own."""

    def __init__(self) -> None:
        self.socket = Path(tempfile.mkdtemp(prefix="scope_cost_")) / "s"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", _DRAIN, str(self.socket), str(os.getpid())]
        self._process = subprocess.Popen(command)

    def end_as(self, sidecar: str) -> None:
        """Freeze it, or kill it."""
        assert self._process is not None
        if sidecar == "frozen":
            self._process.send_signal(signal.SIGSTOP)
        elif sidecar == "dead":
            self._process.kill()

    def close(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Training:
    """Steps of one training, watched or not."""

    def __init__(self, ranks: int, layout: str, run: Path) -> None:
        import mt_megatron
        from mt_megatron.scope.interfaces import Facts, Options
        from mt_megatron.scope.session import Session

        warnings.filterwarnings("ignore")
        mt_megatron.patch("cpu")
        if layout == "dp":
            case, spread = replace(SHAPE, micro_batch=ranks * SHAPE.micro_batch), (_ZERO,)
        else:
            case, spread = SHAPE, ("--tensor-model-parallel-size", str(ranks))
        copies = ranks if layout == "dp" else 1
        self.case = case
        self.ours = Ours(case, token_ids(case), spread, copies)
        job, trainable = self.ours.job, self.ours.trainable
        self.session = Session(
            run,
            rank=job.rank,
            layout=job.layout,
            backend=job.backend,
            chunks=trainable.chunks,
            optimizer=trainable.optimizer,
            options=Options(
                live=False, interval=INTERVAL, watch=(f"attention@decoder.layers.0:every={_LIVE}",)
            ),
            facts=Facts(
                micro_batch_size=case.micro_batch // job.layout.dp,
                seq_length=case.sequence,
                vocab_size=case.vocabulary,
                model={"name": case.name},
            ),
            sidecar=self._drain,
        )
        self._drained: Drain | None = None
        self._waits = True
        self.session.start()

    def _drain(self, run: Path, node: int, **options: Any) -> Drain:
        self._drained = Drain()
        return self._drained

    def sidecar_is(self, sidecar: str) -> None:
        """From now on: ``drained``, ``frozen`` or ``dead``; all ranks are connected."""
        while self.session.waiting:
            time.sleep(0.01)
        together()
        self._waits = sidecar == "drained"
        if self._drained is not None:
            self._drained.end_as(sidecar)

    def timed(self, numbers: tuple[int | None, ...] | int) -> tuple[float, float]:
        """Seconds of steps that begin together on all ranks, with what is sent of them encoded: by the wall,
        and of the process's processors."""
        each: tuple[int | None, ...] = (None,) * numbers if isinstance(numbers, int) else numbers
        together()
        began, used = time.perf_counter(), time.process_time()
        for number in each:
            self._step(number)
        while self._waits and self.session.waiting:
            time.sleep(0.0002)
        return time.perf_counter() - began, time.process_time() - used

    def _step(self, number: int | None) -> None:
        from mt_megatron.scope.interfaces import StepFigures

        if number is None:
            self.ours.step()
            return
        self.session.begin_step(number)
        result = self.ours.observed_step(self.session)
        figures = StepFigures(
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            skipped=result.skipped,
        )
        self.session.end_step(number, figures)


def blocks(training: Training, rounds: int) -> dict[str, list[Any]]:
    """Unwatched and other blocks in turn, the others of a round in random order, the same on all ranks.

    Per arm lists of [seconds, processor seconds] of the unwatched block before, its own and the one after.
    """
    rng = np.random.default_rng(0)
    found: dict[str, list[Any]] = {arm: [] for arm in ARMS}

    def block(arm: str) -> tuple[float, float]:
        time.sleep(_SETTLE_SECONDS)
        return training.timed(ARMS[arm])

    before = block("off again")
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for arm in rng.permutation(ROUND).tolist():
            own, after = block(arm), block("off again")
            if number >= 0:
                found[arm].append([before, own, after])
            before = after
    return found


def main() -> None:
    """Take the rounds; each rank writes what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--layout", choices=("dp", "tp"), required=True)
    parser.add_argument("--pin", choices=("auto", "yes", "no"), required=True)
    parser.add_argument("--sidecar", choices=("drained", "frozen", "dead"), required=True)
    args = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    training: Any = Training(ranks, args.layout, args.scratch / "run")
    training.timed(5)
    training.timed((1, 1))
    training.sidecar_is(args.sidecar)
    unrest = pilot(training, rank) if args.pin == "auto" else {}
    pinned = unrest["pinned"] < unrest["free"] if unrest else args.pin == "yes"
    Cores().pin(rank if pinned else None)
    step = agreed(statistics.median(training.timed(2)[0] / 2 for _ in range(8)))
    found = blocks(training, args.rounds)
    training.session.close()
    about = {
        "shape": SHAPE.name,
        "layout": f"{args.layout}{ranks}",
        "sidecar": args.sidecar,
        "tokens_per_step": training.case.tokens,
        "ranks": ranks,
        "pinned": pinned,
        "unrest_percent": unrest,
        "threads": torch.get_num_threads(),
        "step_seconds": step,
    }
    (args.scratch / f"blocks-{rank}.json").write_text(json.dumps({"blocks": found, "about": about}))
    training.ours.close()


if __name__ == "__main__":
    main()

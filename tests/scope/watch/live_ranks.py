"""The rank's side: requests and commands that arrive while a training runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.models.families import family_of
from mt_megatron.scope import session as sessions
from mt_megatron.scope.interfaces import Facts, NoControl, Options
from mt_megatron.scope.session import Session
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, make_forward_step, train_step
from tests.parity.case import GLOBAL_BATCH, MICRO_BATCH, MODEL, OPTIMIZER, SEQUENCE
from tests.scope.watch.ranks import batches_of, begin, watched
from tests.scope.watch.reader import Reader

STEPS = 8
FLAGS = f"{MODEL} {OPTIMIZER} --untie-embeddings-and-output-weights"


class Heard(NoControl):
    """A control that keeps what it hears."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def put(self, command: Any) -> None:
        self.commands.append(command)


def told_while_training() -> dict[str, Any]:
    """What came of messages after step 2 and after step 5."""
    begin()
    config = load_config([*FLAGS.split(), "--seed", "5", "--mock-data"])
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        watch = ("mlp@decoder.layers.0",)
        with watched(config, job, trainable, watch=watch, interval=1) as (observed, reader):
            assert reader is not None
            session, control = observed.session, Heard()
            session.control = control
            shape = Shape(
                num_microbatches=config.num_microbatches(1), micro_batch_size=MICRO_BATCH, seq_length=SEQUENCE
            )
            batches = [batches_of(job, 5, STEPS)]
            forward_step = make_forward_step(family, job.backend.device(job.backend.current_device()))
            for iteration in range(1, STEPS + 1):
                observed.begin(iteration)
                result = train_step(
                    trainable, forward_step, batches, shape, job, iteration=iteration, observer=observed
                )
                observed.end(iteration, result)
                if iteration == 2:
                    _until(lambda: 0 in reader.frames)
                    requests = ["residual@decoder.layers.1", "mlp@nowhere", "no request", "context@embedding"]
                    requests += [f"{what}@decoder.layers.1:heads=99" for what in ("attention", "mlp")]
                    requests += [f"moments@decoder.layers.0:tokens={SEQUENCE}-{SEQUENCE + 9}"]
                    beyond = f"@decoder.layers.0:samples={GLOBAL_BATCH}"
                    requests += [f"mlp{beyond}", f"moments{beyond}"]
                    reader.tell(0, {"k": "watch", "requests": requests})
                    _until(lambda: session._texts is not None)
                elif iteration == 5:
                    reader.tell(0, {"k": "watch", "requests": []})
                    reader.tell(0, {"k": "unheard of"})
                    reader.tell(0, {"k": "command", "id": "7", "do": "pause", "arguments": {}})
                    _until(lambda: bool(control.commands))
                    session.answer({"id": "7", "ok": True, "value": 3})
        return _by_command(config, job, trainable) | {
            "tensors": sorted({(f["i"], f["path"], f["what"]) for _, f in reader.of("tensor")}),
            "lines": reader.lines,
            "commands": [each["do"] for each in control.commands],
            "results": [f for _, f in reader.of("result")],
        }


def _by_command(config: Any, job: Any, trainable: Any) -> dict[str, Any]:
    """Steps recorded with an interval that the run never reaches, a request by command after step 6, and
    evaluations after steps 3 and 8 and of a step that is not this start's."""
    watch = ("residual@decoder.layers.0",)
    with watched(config, job, trainable, watch=watch, interval=1000) as (observed, reader):
        assert reader is not None
        session = observed.session
        session.validated(4, loss=9.0, tokens=7)
        shape = Shape(
            num_microbatches=config.num_microbatches(1), micro_batch_size=MICRO_BATCH, seq_length=SEQUENCE
        )
        batches = [batches_of(job, 5, STEPS)]
        forward_step = make_forward_step(family_of(config), job.backend.device(job.backend.current_device()))
        for iteration in range(1, STEPS + 1):
            observed.begin(iteration)
            result = train_step(
                trainable, forward_step, batches, shape, job, iteration=iteration, observer=observed
            )
            observed.end(iteration, result)
            if iteration in (3, 8):
                session.validated(iteration, loss=2.5, tokens=100 * iteration)
            if iteration == 6:
                session.handle_request({"texts": ["residual@decoder.layers.1:every=1000"]})
    schemas = {frame["id"]: frame["entries"] for _, frame in reader.of("schema")}
    stats = [(frame["i"], schemas[frame["id"]], frame) for _, frame in reader.of("stats")]
    evaluated = [["", "validation_loss", 2]]
    return {
        "residuals": sorted((frame["i"], frame["path"]) for _, frame in reader.of("tensor")),
        "sampled": [step for step, entries, _ in stats if entries != evaluated],
        "evaluated": [(step, list(f["values"])) for step, entries, f in stats if entries == evaluated],
        "attempts": sorted({frame["attempt"] for *_, frame in stats}),
    }


def one_rank_fails(what: str) -> dict[str, Any]:
    """Start a session of which rank 1 fails in ``what``; what came of it, and of a step, on this rank."""
    begin()
    config = load_config([*FLAGS.split(), "--seed", "5", "--mock-data"])
    with joined(config, mt_megatron.backend()) as job:
        trainable = build(config, job, family_of(config))
        reader, said = Reader() if job.rank == 0 else None, list[str]()
        session = Session(
            "/nowhere",
            rank=job.rank,
            layout=job.layout,
            backend=job.backend,
            chunks=trainable.chunks,
            optimizer=trainable.optimizer,
            options=Options(live=False, interval=1, watch=()),
            facts=Facts(
                micro_batch_size=MICRO_BATCH,
                global_batch_size=GLOBAL_BATCH,
                seq_length=SEQUENCE,
                vocab_size=128,
                model={"name": "test"},
            ),
            say=said.append,
            sidecar=None if reader is None else reader.make,
        )

        def fails(*given: Any, **options: Any) -> Any:
            raise OSError("too many open files")

        taken = vars(sessions)["Sender"]
        if job.rank == 1 and what == "about":
            session._about = fails  # type: ignore[method-assign]
        elif job.rank == 1:
            sessions.Sender = fails  # type: ignore[misc, assignment]
        try:
            session.start()
            session.begin_step(1)
            session.end_step(1, None)
            (together,) = job.sum_over_ranks([1.0])
            found = {"on": session.is_on, "said": said, "together": together}
        finally:
            sessions.Sender = taken  # type: ignore[misc]
            session.close()
        return found


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""Work of the ranks of the seam's tests; each function returns JSON-able results."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.comm.damaged import Damaged
from tests.patches.small_gpt import BATCH, SEQUENCE
from tests.pipeline.execute import small_models
from tests.pipeline.execute.ranks import use


@contextmanager
def sent_over(name: str, lines: list[str] | None = None) -> Iterator[Any]:
    """Steps within it are sent over the transport ``name``, and not by torch; the exchange."""
    from mt_megatron.comm.choice import choose
    from mt_megatron.seams import transport as seam

    choose(name, say=([] if lines is None else lines).append)
    try:
        seam.groups_made()
        yield seam.installed()
    finally:
        seam.close()
        choose(None)


@contextmanager
def without_torchs() -> Iterator[None]:
    """Transfers by torch are errors."""

    def refuse(*unused: Any, **also: Any) -> Any:
        raise AssertionError("a tensor was sent by torch.distributed")

    names = ("isend", "irecv", "send", "recv", "batch_isend_irecv")
    with mock.patch.multiple("torch.distributed", **dict.fromkeys(names, refuse)):
        yield


def same_over(pp: int, cases: list[dict[str, Any]], transport: str = "shm") -> dict[str, list[str]]:
    """Per case and schedule (None: upstream's) what differs from upstream's over collectives."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.update(_case(transport=transport, **{"pp": pp, **case}))
    return found


def _case(
    *,
    pp: int,
    model: str,
    schedules: list[str | None],
    transport: str,
    chunks: int = 1,
    microbatches: int = 4,
    uneven: bool = False,
    tp: int = 1,
    **options: Any,
) -> dict[str, list[str]]:
    small_models.start(pp, vpp=chunks if chunks > 1 else None, tp=tp)
    pipeline = small_models.Pipeline(
        model, layers=pp * chunks, **({"variable_seq_lengths": True} if uneven else {}), **options
    )
    data = _uneven(pipeline, microbatches) if uneven else None
    use(None, pp)
    expected = pipeline.digests(pipeline.step(microbatches, data=data))
    found = {}
    with sent_over(transport) as exchange, without_torchs():
        assert exchange.transport.name == transport
        for name in schedules:
            use(name, pp, chunks, microbatches)
            got = pipeline.digests(pipeline.step(microbatches, data=data))
            label = (
                f"P{pp} T{tp} {model} {name} x{chunks} m{microbatches} {'uneven ' * uneven}{options or ''}"
            )
            assert got.keys() == expected.keys() and len(got) > 5
            found[label.strip()] = [key for key in expected if got[key] != expected[key]]
    use(None, pp)
    return found


def in_batches(pp: int) -> dict[str, list[str]]:
    """What differs from overlapped transfers over collectives when interleaved transfers are batched.

    Between two stages upstream posts gradient and output in one order on both, so that each is taken for the
    other; Megatron-LM refuses that. Queues of their own cannot mix them up."""
    small_models.start(pp, vpp=2)
    use(None, pp)
    found = {}
    batched = small_models.Pipeline("tied", layers=2 * pp, overlap_p2p_comm=False, batch_p2p_comm=True)
    overlapped = small_models.Pipeline("tied", layers=2 * pp)
    expected = overlapped.digests(overlapped.step(2 * pp))
    with sent_over("shm"), without_torchs():
        for name, pipeline in {"batched": batched, "overlapped": overlapped}.items():
            got = pipeline.digests(pipeline.step(2 * pp))
            found[name] = [key for key in expected if got[key] != expected[key]]
    return found


def _uneven(pipeline: Any, microbatches: int) -> list[Any]:
    return [
        {name: value[:, : 4 + index % 4] for name, value in batch.items()}
        for index, batch in enumerate(pipeline.batches(microbatches))
    ]


def damaged(pp: int) -> dict[str, list[str]]:
    """What differs when one bit of one message of rank 0 is another, under upstream's schedule and ours."""
    from mt_megatron.comm import kinds

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    use(None, pp)
    expected = pipeline.digests(pipeline.step(4))
    found = {}
    kind = kinds.KINDS["shm"]
    for name in (None, "zb_h1"):

        def make(setting: Any) -> Any:
            made = kind.make(setting)
            return Damaged(made, 3) if torch.distributed.get_rank() == 0 else made

        with (
            mock.patch.dict(kinds.KINDS, {"shm": dataclasses.replace(kind, make=make)}),  # type: ignore[dict-item]
            sent_over("shm"),
        ):
            use(name, pp)
            got = pipeline.digests(pipeline.step(4))
        found[str(name)] = [key for key in expected if got[key] != expected[key]]
    use(None, pp)
    return found


def evaluations(pp: int) -> dict[str, Any]:
    """Losses of forward-only steps, of a pipeline of one and of two chunks, over collectives and over shm."""
    found: dict[str, Any] = {}
    for chunks in (1, 2):
        small_models.start(pp, vpp=chunks if chunks > 1 else None)
        pipeline = small_models.Pipeline("dense", layers=pp * chunks)
        use(None, pp)
        expected = pipeline.step(4, forward_only=True)
        with sent_over("shm"), without_torchs():
            # Twice: handles that the first step dropped must not be in the second one's way.
            found[str(chunks)] = [expected, *(pipeline.step(4, forward_only=True) for _ in range(2))]
    return found


def heard(pp: int) -> dict[str, Any]:
    """Events of transfers of upstream's schedules over collectives and over shm, times left out."""
    from mt_megatron.seams import collectives, events

    found: dict[str, Any] = {}
    for chunks in (1, 2):
        small_models.start(pp, vpp=chunks if chunks > 1 else None)
        pipeline = small_models.Pipeline("dense", layers=pp * chunks)
        use(None, pp)

        def step(pipeline: Any = pipeline) -> list[Any]:
            told: list[Any] = []
            collectives.restart_numbers()

            def hear(phase: str, name: str, attrs: Any) -> None:
                if name == "p2p":
                    told.append([phase, {key: repr(attrs[key]) for key in sorted(attrs)}])

            stop = events.subscribe(hear)
            pipeline.step(4)
            stop()
            return told

        expected = step()
        with sent_over("shm"):
            found[str(chunks)] = [expected, step()]
    return found


def lifecycle(pp: int) -> dict[str, Any]:
    """Exchanges over groups that are made again, two models, a fork, ``unpatch``; memory that is left."""
    import mt_megatron
    from mt_megatron.comm.choice import choose
    from mt_megatron.seams import transport as seam

    found: dict[str, Any] = {}
    choose("shm", say=lambda line: None)
    small_models.start(pp)
    first = seam.installed()
    one, other = (small_models.Pipeline("dense", layers=pp, hidden_size=size) for size in (32, 64))
    steps = [each.digests(each.step(4)) for each in (one, other, one, other)]
    found["two models"] = steps[0] == steps[2] and steps[1] == steps[3] and steps[0] != steps[1]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"none" if seam.installed() is None else b"one")
        os._exit(0)
    os.waitpid(child, 0)
    found["in a fork"] = os.read(read, 10).decode()
    found["after a fork"] = one.digests(one.step(4)) == steps[0]
    found["memory"] = _memory()
    small_models.start(pp)
    second = seam.installed()
    found["again"] = second is not None and second is not first
    pipeline = small_models.Pipeline("dense", layers=pp, hidden_size=32)
    found["made again"] = pipeline.digests(pipeline.step(4)) == steps[0]
    found["memory again"] = _memory()
    torch.distributed.barrier()
    mt_megatron.unpatch()
    found["after unpatch"] = seam.installed() is None
    found["memory after"] = _memory()
    choose(None)
    return found


def _memory() -> int:
    """Mappings of anonymous shared memory of ours in this process."""
    return sum("memfd:" in line and "mt" in line for line in Path("/proc/self/maps").read_text().splitlines())


def refusals(pp: int) -> dict[str, Any]:
    """With a transport that works on one rank only: the error of one that was asked for, what ``auto`` says
    and does, and that a run goes on."""
    from mt_megatron.comm import kinds
    from mt_megatron.errors import ConfigError, MtMegatronError

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    expected = pipeline.digests(pipeline.step(4))
    kind = kinds.KINDS["shm"]
    is_bad = torch.distributed.get_rank() == 1

    def no_memory() -> str | None:
        with mock.patch("os.memfd_create", side_effect=PermissionError(1, "Operation not permitted")):
            return kind.why_not_here()

    class Fails:
        name = "shm"

        def prepare(self, edges: Any) -> None:
            raise OSError(24, "Too many open files")

        def abandon(self, cause: BaseException | None = None) -> None:
            pass

        def require_open(self) -> None:
            pass

        def close(self) -> None:
            pass

    def cannot_be_made(setting: Any) -> Any:
        raise MtMegatronError("no Unix socket can be made")

    def cannot_be_prepared(setting: Any) -> Any:
        # The other rank waits for this one's channels a little.
        return Fails() if is_bad else kind.make(dataclasses.replace(setting, seconds=1.0))

    changes: dict[str, dict[str, Any]] = {
        "not here": {"why_not_here": no_memory} if is_bad else {},
        "not made": {"make": cannot_be_made} if is_bad else {},
        "not prepared": {"make": cannot_be_prepared},
    }
    found: dict[str, Any] = {}
    for name, change in changes.items():
        lines: list[str] = []
        said = None
        with mock.patch.dict(kinds.KINDS, {"shm": dataclasses.replace(kind, **change)}):  # type: ignore[dict-item]
            try:
                with sent_over("shm"):
                    pass
            except ConfigError as error:
                said = str(error)
            with sent_over("auto", lines) as exchange:
                same = pipeline.digests(pipeline.step(4)) == expected
        found[name] = {"error": said, "lines": lines, "upstream": exchange is None, "same": same}
    return found


def one_fails(pp: int) -> dict[str, Any]:
    """Rank 1 fails in its third forward pass, by upstream's schedule and by ours: the errors of this rank and
    when they came, of a further step too, and whether new channels carry the same step as before."""
    from mt_megatron.errors import MtMegatronError

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    use(None, pp)
    expected = pipeline.digests(pipeline.step(4))
    bad = pipeline.batches(4)
    if torch.distributed.get_rank() == 1:
        bad[2]["mask"] = torch.zeros(BATCH, 1 + SEQUENCE)
    found: dict[str, Any] = {}
    for name in (None, "zb_h1"):
        use(name, pp)
        errors: list[str] = []
        moments: list[float] = []
        with sent_over("shm"):
            for data in (bad, None):
                try:
                    # The second of two: one rank may have ended the first before the other failed.
                    pipeline.step(4, data=data)
                    pipeline.step(4, data=data)
                except (RuntimeError, MtMegatronError) as error:
                    moments.append(time.monotonic())
                    errors.append(f"{type(error).__name__}: {error}")
        with sent_over("shm"):
            same = pipeline.digests(pipeline.step(4)) == expected
        found[str(name)] = {"errors": errors, "moments": moments, "same": same}
    use(None, pp)
    return found


def different_wishes(pp: int) -> list[str]:
    """Errors of ranks that were asked for different transports."""
    from mt_megatron.errors import ConfigError

    found = []
    for wish in ("shm", "collective"):
        small_models.start(pp)
        try:
            with sent_over(wish if torch.distributed.get_rank() == 0 else "auto"):
                found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def two_hosts(pp: int) -> dict[str, Any]:
    """Four stages on two hosts by what they say of themselves: which edges go where, and what differs."""
    from mt_megatron.comm import bootstrap

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])

    def place(own: int) -> Any:
        return dataclasses.replace(
            bootstrap.own_place(own), boot=f"boot {rank // 2}", host=f"host{rank // 2}"
        )

    found: dict[str, Any] = {"differ": {}}
    for chunks, schedules in ((1, (None, "zb_h1")), (2, (None, "breadth_first"))):
        small_models.start(pp, vpp=chunks if chunks > 1 else None)
        batched = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
        pipeline = small_models.Pipeline("dense", layers=pp * chunks, **batched)
        use(None, pp)
        expected = pipeline.digests(pipeline.step(4))
        lines: list[str] = []
        with mock.patch("mt_megatron.comm.choice.own_place", place), sent_over("auto", lines) as exchange:
            for name in schedules:
                use(name, pp, chunks)
                got = pipeline.digests(pipeline.step(4))
                found["differ"][f"{chunks} {name}"] = [key for key in expected if got[key] != expected[key]]
            found[f"lines {chunks}"] = lines
            found[f"transports {chunks}"] = exchange.transport.name
        use(None, pp)
    return found


def encoder_and_decoder() -> dict[str, Any]:
    """An encoder that feeds the two tensor parallel ranks of a decoder: what each rank receives, over
    collectives and over shm, and the refusal of what cannot be summed."""
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.comm import bootstrap
    from mt_megatron.comm.transport import FORWARD, Edge
    from mt_megatron.errors import ConfigError

    mt_megatron.patch("cpu")
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import _communicate

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        encoder_tensor_model_parallel_size=1,
        encoder_pipeline_model_parallel_size=1,
    )
    config = ModelParallelConfig(pipeline_dtype=torch.float32, batch_p2p_comm=False)
    is_encoder = dist.get_rank() == 0
    tensor = torch.arange(6.0).view(2, 3) / 7 + dist.get_rank()

    def exchange(**given: Any) -> Any:
        arguments = {
            "tensor_send_next": None,
            "tensor_send_prev": None,
            "recv_prev": False,
            "recv_next": False,
            "tensor_shape": (2, 3),
            "config": config,
            **given,
        }
        before, after, _ = _communicate(**arguments)
        return [None if each is None else each.tolist() for each in (before, after)]

    def both() -> Any:
        forward = exchange(tensor_send_next=tensor) if is_encoder else exchange(recv_prev=True)
        backward = exchange(recv_next=True) if is_encoder else exchange(tensor_send_prev=tensor)
        return [forward, backward]

    found: dict[str, Any] = {"expected": both()}
    with sent_over("shm"), without_torchs():
        found["found"] = both()
        if is_encoder:
            try:
                exchange(recv_next=True, wait_on_reqs=False)
            except ConfigError as error:
                found["refused"] = str(error)

    def place(own: int) -> Any:
        there = bootstrap.own_place(own)
        return dataclasses.replace(there, boot="another") if own == 2 else there

    with mock.patch("mt_megatron.comm.choice.own_place", place), sent_over("auto") as mixed:
        found["transports"] = mixed.transport.name
        found["on two hosts"] = both()
        # Any dtype and shape over collectives too.
        edge, channels = Edge(0, 2, FORWARD), mixed.transport
        whole = torch.arange(6.0).view(2, 3)
        for odd in ((whole * (1 + 2j)).conj(), whole.view(1, 1, 1, 1, 1, 1, 2, 3)):
            if is_encoder:
                channels.post_send(edge, odd, with_shape=True)
            elif dist.get_rank() == 2:
                got = channels.post_recv(edge, None, odd.dtype).wait()
                found.setdefault("odd", []).append(bool(torch.equal(got, odd)))
        channels.finish()
    return found


def ring_exchange(pp: int) -> str:
    """What a model with ``use_ring_exchange_p2p`` gets."""
    from mt_megatron.errors import ConfigError

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp, use_ring_exchange_p2p=True)
    with sent_over("shm"):
        try:
            pipeline.step(4)
        except ConfigError as error:
            return str(error)
    return ""


def shapes(pp: int) -> list[Any]:
    """Results of ``_communicate_shapes`` in both directions at once, over collectives and over shm."""
    from types import SimpleNamespace

    small_models.start(pp)
    from megatron.core.pipeline_parallel.p2p_communication import _communicate_shapes

    rank = torch.distributed.get_rank()
    config = SimpleNamespace(use_ring_exchange_p2p=False)
    tensor = torch.empty(SEQUENCE + rank, BATCH, 5)

    def call() -> Any:
        if rank == 0:
            return _communicate_shapes(tensor, None, False, True, config)
        return _communicate_shapes(None, tensor, True, False, config)

    expected = call()
    with sent_over("shm"), without_torchs():
        return [expected, call()]


def several(pp: int, calls: list[list[Any]]) -> dict[str, Any]:
    """The results of functions of this file, by name; each call is a name and further arguments."""
    return {name: globals()[name](pp, *arguments) for name, *arguments in calls}

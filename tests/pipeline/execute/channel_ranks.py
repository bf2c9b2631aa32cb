"""Transfers, reductions and failures under the executor; each function returns JSON-able results."""

from __future__ import annotations

import time
from typing import Any

import torch

from mt_megatron.errors import ConfigError
from tests.patches import small_gpt
from tests.pipeline.execute import small_models
from tests.pipeline.execute.ranks import use
from tests.second_lane import DAILY

AHEAD = (1, 2, 4) if DAILY else (1, 4)
"""By how many actions receives are made ready early."""


def without_tags(pp: int) -> dict[str, list[str]]:
    """Differences when each edge has a group of its own, as NCCL needs it, and no message a tag. Ranks have
    made other numbers of groups before, as stages do: the first and the last share embeddings."""
    from mt_megatron.comm.collective import CollectiveTransport
    from mt_megatron.pipeline.execute.source import set_transport

    found = {}
    chunks, count = 2, 2 * pp
    small_models.start(pp, vpp=chunks)
    pipeline = small_models.Pipeline("dense", layers=pp * chunks)
    own = torch.distributed.get_rank()
    for _ in range(own):
        torch.distributed.new_group([own], use_local_synchronization=True)
    use(None, pp)
    expected = pipeline.digests(pipeline.step(count))
    made: list[Any] = []

    def untagged(group: Any, device: Any, made: list[Any] = made) -> Any:
        made.append(CollectiveTransport(group, device, tagged=False))
        return made[0]

    set_transport(untagged)
    for name in ("breadth_first", "zb_h1"):
        use(name, pp, chunks, count)
        got = pipeline.digests(pipeline.step(count))
        found[name] = [key for key in expected if got[key] != expected[key]]
    assert len(made) == 1 and made[0]._groups
    set_transport(None)
    use(None, pp)
    return found


def uneven(pp: int) -> dict[str, list[str]]:
    """What differs from upstream where each micro-batch has another length."""
    found = {}
    chunks = 2
    small_models.start(pp, vpp=chunks)
    pipeline = small_models.Pipeline("dense", layers=pp * chunks, variable_seq_lengths=True)
    data = [
        {name: value[:, : 4 + index] for name, value in batch.items()}
        for index, batch in enumerate(pipeline.batches(4))
    ]
    use(None, pp)
    expected = pipeline.digests(pipeline.step(4, data=data))
    for name in ("breadth_first", "zb_h1"):
        use(name, pp, chunks)
        got = pipeline.digests(pipeline.step(4, data=data))
        found[name] = [key for key in expected if got[key] != expected[key]]
    use(None, pp)
    return found


def made_ready_early(pp: int) -> dict[str, list[str]]:
    """Differences from upstream where shapes are unknown and receives come before the forwards that tell
    the shapes of the gradients, as under ``auto`` on slow links; micro-batches of other lengths or not."""
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule
    from mt_megatron.pipeline.generate.catalogue import generate
    from mt_megatron.pipeline.lowering import lowered

    found = {}
    for chunks, names in ((1, ("1f1b", "zb_h1")), (2, ("depth_first", "breadth_first", "memory_capped"))):
        small_models.start(pp, vpp=chunks if chunks > 1 else None)
        pipeline = small_models.Pipeline("dense", layers=pp * chunks, variable_seq_lengths=True)
        for count, uneven in ((4, True), (4, False), (1, True)):
            cut = [slice(4 + index if uneven else None) for index in range(count)]
            batches = pipeline.batches(count)
            data = [
                {name: value[:, each] for name, value in batch.items()}
                for each, batch in zip(cut, batches, strict=True)
            ]
            use(None, pp)
            upstreams = chunks == 1 or count % pp == 0
            expected = pipeline.digests(pipeline.step(count, data=data)) if upstreams else None
            for name in names:
                options = {"cap": 2} if name == "memory_capped" else {}
                try:
                    made = generate(name, ranks=pp, chunks=chunks, microbatches=count, **options)
                except ConfigError:
                    continue
                for ahead in AHEAD:
                    set_pipeline_schedule(lowered(made, ahead=ahead))
                    got = pipeline.digests(pipeline.step(count, data=data))
                    expected = expected or got
                    label = f"{name} x{chunks} m{count} ahead {ahead}{' uneven' * uneven}"
                    found[label] = [key for key in expected if got[key] != expected[key]]
    use(None, pp)
    return found


def evaluations(pp: int) -> dict[str, Any]:
    """Losses of forward-only steps of 4 micro-batches under upstream's schedules, and of 4 and of 3 under
    ours, by placement; random states must stay as they were."""
    from tests.pipeline.execute.ranks import random_states

    found: dict[str, Any] = {}
    for chunks, v, name in ((1, False, "zb_h1"), (2, False, "breadth_first"), (2, True, "zbv")):
        small_models.start(pp, vpp=chunks if chunks > 1 else None, v=v)
        pipeline = small_models.Pipeline("dense", layers=pp * chunks, hidden_dropout=0.1)
        for chunk in pipeline.chunks:
            chunk.eval()
        upstream = None
        if not v:
            use(None, pp)
            upstream = pipeline.step(4, forward_only=True)
        use(name, pp, chunks)
        before = random_states()
        ours = [pipeline.step(count, forward_only=True) for count in (4, 3)]
        assert random_states() == before
        found[name] = {"upstream": upstream, "ours": ours}
    use(None, pp)
    return found


def reductions(pp: int) -> dict[str, Any]:
    """For a schedule with early and one with late reductions: what was computed and reduced in which order
    on this rank, and what differs between them."""
    from mt_megatron.pipeline.execute import executor
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule
    from mt_megatron.pipeline.generate.catalogue import generate
    from mt_megatron.pipeline.lowering import lowered

    small_models.start(pp, vpp=2)
    options = {"overlap_grad_reduce": True, "bucket_size": 1000}
    pipeline = small_models.Pipeline("dense", layers=2 * pp, ddp=options)
    log: list[str] = []
    for index, chunk in enumerate(pipeline.chunks):
        for group in chunk.bucket_groups:

            def start(original: Any = group.start_grad_sync, index: int = index) -> None:
                log.append(f"reduce {index}")
                original()

            group.start_grad_sync = start
    found: dict[str, Any] = {}
    digests = {}
    for name in ("breadth_first", "zb_h1"):
        made = generate(name, ranks=pp, chunks=2, microbatches=2)
        for early in (True, False):
            set_pipeline_schedule(lowered(made, reduce_early=early))
            original = executor.StepRun._at

            def at(self: Any, action: Any, original: Any = original) -> int:
                chunk: int = original(self, action)
                log.append(f"{action.kind.value} {chunk}")
                return chunk

            executor.StepRun._at = at  # type: ignore[method-assign]
            log.clear()
            digests[name, early] = pipeline.digests(pipeline.step(2))
            executor.StepRun._at = original  # type: ignore[method-assign]
            found[f"{name} {'early' if early else 'late'}"] = list(log)
    first = next(iter(digests.values()))
    found["differ"] = [key for each in digests.values() for key in first if each[key] != first[key]]
    use(None, pp)
    return found


def partly_recomputed(pp: int) -> dict[str, Any]:
    """With at most one micro-batch in flight whose layers are kept: for each forward and backward pass of the
    first stage its kind, micro-batch and whether everything is recomputed."""
    from unittest import mock

    from mt_megatron.pipeline.execute import executor
    from mt_megatron.seams.schedule import run_schedule

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    pipeline.config.num_microbatches_with_partial_activation_checkpoints = 1
    step, log = small_models._forward_step(pipeline.config), []
    original = executor.StepRun._at

    def at(self: Any, action: Any) -> int:
        log.append([action.kind.value, action.microbatch])
        return original(self, action)

    def forward_step(iterator: Any, model: Any, recomputes_all: bool) -> Any:
        log[-1].append(recomputes_all)
        return step(iterator, model)

    use("1f1b", pp)
    for chunk in pipeline.chunks:
        chunk.zero_grad_buffer()
    with mock.patch.object(executor.StepRun, "_at", at):
        run_schedule(
            forward_step,
            pipeline.chunks,
            [iter(pipeline.batches(4))],
            num_microbatches=4,
            seq_length=small_gpt.SEQUENCE,
            micro_batch_size=small_gpt.BATCH,
        )
    use(None, pp)
    return {"log": log}


def wrong_orders(pp: int) -> dict[str, list[str]]:
    """What differs from upstream when the validator is left out and a schedule breaks the rule: backwards of
    a stage, or messages of an edge, in another order."""
    from unittest import mock

    from mt_megatron.pipeline.actions import Action, Kind, Schedule
    from mt_megatron.pipeline.execute import source
    from mt_megatron.pipeline.generate.catalogue import generate
    from mt_megatron.pipeline.lowering import lowered

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    use(None, pp)
    expected = pipeline.digests(pipeline.step(4))
    made = lowered(generate("zb_h1", ranks=pp, microbatches=4))

    def exchanged(kinds: tuple[Kind, ...], one: int, other: int, rank: int) -> Schedule:
        def moved(action: Action) -> Action:
            numbers = {one: other, other: one}
            if action.kind not in kinds:
                return action
            return action._replace(microbatch=numbers.get(action.microbatch, action.microbatch))

        ranks = list(made.ranks)
        ranks[rank] = tuple(map(moved, ranks[rank]))
        return Schedule(made.name, made.placement, 4, tuple(ranks))

    found = {}
    for name, schedule in {
        "weights": exchanged((Kind.W,), 2, 3, rank=1),
        # Of the first two forwards of rank 0, which both are there before the second is sent.
        "messages": _sent_late(made),
    }.items():
        with mock.patch.object(source, "check"):
            source.set_pipeline_schedule(schedule)
            got = pipeline.digests(pipeline.step(4))
        found[name] = [key for key in expected if got[key] != expected[key]]
    use(None, pp)
    return found


def _sent_late(made: Any) -> Any:
    """Rank 0 sends its first output after its second."""
    from mt_megatron.pipeline.actions import Action, Kind, Schedule

    first, second = Action(Kind.SEND_F, 0, 0), Action(Kind.SEND_F, 0, 1)
    actions = [each for each in made.ranks[0] if each != first]
    actions.insert(actions.index(second) + 1, first)
    return Schedule(made.name, made.placement, made.microbatches, (tuple(actions), *made.ranks[1:]))


def refused(pp: int) -> dict[str, str]:
    """The error of each schedule that cannot run here; nothing may have been sent by then."""
    from mt_megatron.errors import ConfigError
    from mt_megatron.pipeline.actions import Schedule
    from mt_megatron.pipeline.execute import source
    from mt_megatron.pipeline.generate.catalogue import generate

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    made = generate("1f1b", ranks=pp, microbatches=4)
    incomplete = Schedule("mine", made.placement, 4, (made.ranks[0][:-1], *made.ranks[1:]))
    found = {}

    def no_transport(*unused: Any) -> Any:
        raise AssertionError("a channel was made")

    source.set_transport(no_transport)
    for name, schedule in {
        "incomplete": incomplete,
        "microbatches": generate("1f1b", ranks=pp, microbatches=3),
        "ranks": generate("1f1b", ranks=pp + 1, microbatches=4),
        "chunks": generate("interleaved", ranks=pp, chunks=2, microbatches=4),
        "forward only": Schedule("evaluation", made.placement, 4, made.ranks, True),
        "other rank": generate("zb_h1", ranks=pp, microbatches=4) if torch.distributed.get_rank() else made,
    }.items():
        source.set_pipeline_schedule(lambda step, count, only, chosen=schedule: chosen)
        try:
            pipeline.step(4)
        except ConfigError as error:
            found[name] = str(error)
    try:
        source.set_pipeline_schedule(incomplete)
    except ConfigError as error:
        found["at once"] = str(error)
    source.set_transport(None)
    use(None, pp)
    expected = pipeline.digests(pipeline.step(4))
    use("1f1b", pp)
    # Nothing is left of what was refused.
    assert pipeline.digests(pipeline.step(4)) == expected
    return found


def one_fails(pp: int) -> dict[str, Any]:
    """Rank 1 fails in its third forward pass and ends; what the others get, and after how many seconds; and
    what a step gets that is tried all the same, over channels that would pair messages of two steps."""
    import torch.distributed as dist

    from mt_megatron.comm.errors import TransportError
    from mt_megatron.patches.device.process_groups import end_groups

    small_models.start(pp)
    pipeline = small_models.Pipeline("dense", layers=pp)
    use("zb_h1", pp, microbatches=8)
    pipeline.step(8)
    data = pipeline.batches(8)
    if dist.get_rank() == 1:
        data[2]["mask"] = torch.zeros(small_gpt.BATCH, 1 + small_gpt.SEQUENCE)
    began, found = time.monotonic(), None
    try:
        for _ in range(2):
            pipeline.step(8, data=data)
    except RuntimeError as error:
        found = str(error)
    seconds = time.monotonic() - began
    try:
        pipeline.step(8)
        again = None
    except TransportError as error:
        again = str(error)
    # As a process does that ends.
    end_groups()
    return {"error": found, "seconds": seconds, "again": again}


def several(pp: int, names: list[str]) -> dict[str, Any]:
    """The results of functions of this file, by name."""
    return {name: globals()[name](pp) for name in names}

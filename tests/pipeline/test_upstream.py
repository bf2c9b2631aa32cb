"""``upstream_calls`` against Megatron-Core's own schedules, one rank at a time, transfers recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.transformer import TransformerConfig

from mt_megatron.pipeline.actions import Action, Call, Kind
from mt_megatron.pipeline.generate.catalogue import generate
from mt_megatron.pipeline.upstream import upstream_calls

Event = tuple[Any, ...]
DIRECTION = {
    Kind.SEND_F: "send next",
    Kind.SEND_B: "send prev",
    Kind.RECV_F: "recv prev",
    Kind.RECV_B: "recv next",
}


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Event]]]:
    """What one rank does: passes by chunk, and directions of exchanges, of starts and of waits."""
    events: list[Event] = []

    def forward(*arguments: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        events.append(("F", parallel_state.get_virtual_pipeline_model_parallel_rank() or 0))
        return torch.ones(1), torch.tensor(0)

    def backward(*arguments: Any, **more: Any) -> torch.Tensor | None:
        events.append(("B", parallel_state.get_virtual_pipeline_model_parallel_rank() or 0))
        # The first stage's input has no gradient.
        return None if parallel_state.is_pipeline_first_stage() else torch.ones(1)

    def communicate(*, wait_on_reqs: bool = True, **more: Any) -> tuple[Any, Any, list[Any]]:
        wanted = {
            "send next": more["tensor_send_next"] is not None,
            "send prev": more["tensor_send_prev"] is not None,
            "recv prev": more["recv_prev"],
            "recv next": more["recv_next"],
        }
        directions = tuple(sorted(name for name, is_wanted in wanted.items() if is_wanted))
        received = tuple(torch.ones(1) if more[name] else None for name in ("recv_prev", "recv_next"))
        if not directions:
            return *received, []
        if wait_on_reqs:
            events.append(("exchange", directions))
            return *received, []
        events.extend(("start", direction) for direction in directions)
        return *received, [SimpleNamespace(wait=lambda: events.append(("exchange", directions)))]

    monkeypatch.setattr(schedules, "forward_step", forward)
    monkeypatch.setattr(schedules, "backward_step", backward)
    monkeypatch.setattr(schedules, "deallocate_output_tensor", lambda *arguments: None)
    monkeypatch.setattr(p2p_communication, "_communicate", communicate)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)

    def run(rank: int, ranks: int, chunks: int, microbatches: int, overlap: bool) -> list[Event]:
        events.clear()
        parallel_state.set_pipeline_model_parallel_world_size(ranks)
        parallel_state.set_pipeline_model_parallel_rank(rank)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        config = TransformerConfig(
            num_layers=ranks * chunks,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
        )
        model = []
        for _ in range(chunks):
            chunk = torch.nn.Linear(1, 1)
            chunk.config, chunk.model_type = config, ModelType.encoder_or_decoder
            model.append(chunk)
        function = (
            schedules.forward_backward_pipelining_with_interleaving
            if chunks > 1
            else schedules.forward_backward_pipelining_without_interleaving
        )
        function(
            forward_step_func=None,
            data_iterator=[None] * chunks,
            model=model,
            num_microbatches=microbatches,
            seq_length=8,
            micro_batch_size=1,
        )
        return list(events)

    try:
        yield run
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_rank(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
        parallel_state.set_pipeline_model_parallel_world_size(None)


def ours(calls: tuple[Call, ...], ranks: int) -> list[Event]:
    made: list[Event] = []
    for call in calls:
        if not isinstance(call, Action):
            made.append(("exchange", tuple(sorted(DIRECTION[each.kind] for each in call))))
        elif call.kind.computes:
            made.append((call.kind.value, call.stage // ranks))
        else:
            made.append(("start", DIRECTION[call.kind]))
    return made


def in_order(events: list[Event]) -> list[Event]:
    """Starts that follow each other in one order."""
    runs = ((kind, list(run)) for kind, run in groupby(events, key=lambda event: event[0]))
    return [event for kind, run in runs for event in (sorted(run) if kind == "start" else run)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("chunks", "overlap"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_calls_are_megatron_s(
    upstream: Callable[..., list[Event]], ranks: int, chunks: int, overlap: bool
) -> None:
    for microbatches in (ranks, 2 * ranks, 4 * ranks, *([1, ranks + 1] if chunks == 1 else [])):
        name = "1f1b" if chunks == 1 else "interleaved"
        schedule = generate(name, ranks=ranks, chunks=chunks, microbatches=microbatches)
        for rank, calls in enumerate(upstream_calls(schedule, overlap=overlap)):
            expected = upstream(rank, ranks, chunks, microbatches, overlap)
            assert len(expected) > 2 * microbatches * chunks
            assert in_order(ours(calls, ranks)) == in_order(expected), (rank, microbatches)

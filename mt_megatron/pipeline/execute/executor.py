"""One step of a schedule on this rank: its actions in order, through upstream's own steps.

Upstream's ``forward_step``, ``backward_step`` and ``deallocate_output_tensor`` compute, so that loss scaling,
auxiliary losses, recomputation and every patch of them hold here too. Micro-batches of a chunk keep their
order whatever the schedule, so that each gradient, loss and statistic is summed in upstream's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_megatron.backends.current import current_backend
from mt_megatron.comm.transport import (
    BACKWARD,
    FORWARD,
    Edge,
    Label,
    Receiving,
    Sending,
    Transport,
)
from mt_megatron.errors import MtMegatronError
from mt_megatron.pipeline.actions import (
    Action,
    Kind,
    Placement,
    Schedule,
    matching_send,
    transfer_out,
    transfers_in,
)
from mt_megatron.pipeline.execute.random_states import KeyedRandom
from mt_megatron.pipeline.execute.reduction import Reduction
from mt_megatron.pipeline.execute.step_times import StepTimes
from mt_megatron.pipeline.execute.transfer_events import TransferEvents, TransferNumbers, receiver_stage
from mt_megatron.seams import events
from mt_megatron.seams.gemm import DeferredWgrad, deferred_wgrad, finding_shared_weights


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """Arguments of ``get_forward_backward_func()`` of Megatron-Core, in lists by chunk."""

    forward_step_func: Callable[..., Any]
    batches: list[Iterator[Any]]
    model: list[torch.nn.Module]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


class ReadySchedule:
    """A schedule, lowered and checked, and what is the same in each of its steps."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        """``rank``: this one, in the pipeline."""
        self.schedule = schedule
        self.rank = rank
        self.actions = schedule.ranks[rank]
        self.numbers = TransferNumbers(schedule, rank)
        self.prepared: Transport | None = None
        """Transport whose edges are made. All ranks give the same answer, as they agree on the schedule; to
        ask each other in every step would be a collective that waits for the host."""


class StepRun:
    """One step of ``ready`` on its rank. Used once."""

    def __init__(
        self, ready: ReadySchedule, call: StepCall, transport: Transport, times: StepTimes | None = None
    ) -> None:
        """``times``: where to mark when actions begin and end."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.utils import get_model_config, get_model_type

        self._call = call
        self._ready = ready
        self._transport = transport
        self._times = times
        self._schedules: Any = schedules
        self._state: Any = parallel_state
        self._placement: Placement = ready.schedule.placement
        self._splits = ready.schedule.splits_backward
        self._config = get_model_config(call.model[0])
        self._model_type = get_model_type(call.model[0])
        self._rank = ready.rank
        group = parallel_state.get_pipeline_model_parallel_group()
        self._ranks = tuple(torch.distributed.get_process_group_ranks(group))
        self._actions = ready.actions
        self._events = TransferEvents(ready.numbers, self._placement, self._ranks, group)
        self._interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
        self._shape = None if self._config.variable_seq_lengths else self._boundary_shape()
        self._reports: list[Any] = []
        backend = current_backend()
        self._tokens = torch.zeros((), dtype=torch.int, device=backend.device(backend.current_device()))
        # An evaluation draws nothing, and leaves the random states as they are.
        draws = not call.forward_only or any(chunk.training for chunk in call.model)
        self._random = KeyedRandom(backend) if draws else None
        self._reduction: Reduction | None = None
        self._parameters = _ParameterSync(self._config, call, self._actions, self._placement)
        # By (stage, micro-batch):
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._shapes: dict[tuple[int, int], torch.Size] = {}
        self._queues: dict[tuple[int, int], DeferredWgrad] = {}
        # By the action that transfers it:
        self._receiving: dict[Action, Receiving] = {}
        self._postponed: dict[Edge, deque[Action]] = {}
        """Gradients whose shapes were not known when they were to be received, and those behind them: the
        messages of a queue are received in the order in which they are sent."""

        self._outgoing: dict[Action, Tensor] = {}
        self._sending: dict[Action, Sending] = {}
        self._last_sent: dict[Edge, tuple[Action, Sending]] = {}
        self._recomputed_fully: dict[tuple[int, int], bool] = {}

    def run(self) -> list[Any]:
        """What the loss function reported, one per micro-batch, on the rank of the last stage; else empty."""
        config, call = self._config, self._call
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        finalizes = config.finalize_model_grads_func is not None and not call.forward_only
        if finalizes:
            embedding = self._schedules.clear_embedding_activation_buffer(config, call.model)
        try:
            if self._ready.prepared is not self._transport:
                self._transport.prepare(self._edges())
                self._ready.prepared = self._transport
            if not call.forward_only:
                stages = self._placement.stages_of(self._rank)
                self._reduction = Reduction(config, call.model, stages, self._actions)
            self._parameters.begin()
            do = {
                Kind.F: self._forward,
                Kind.B: self._backward,
                Kind.W: self._weight_gradients,
                Kind.RECV_F: self._receive,
                Kind.RECV_B: self._receive,
                Kind.SEND_F: self._send,
                Kind.SEND_B: self._send,
                Kind.REDUCE: self._reduce,
            }
            for index, action in enumerate(self._actions):
                if self._reduction is not None:
                    self._reduction.before(index)
                do[action.kind](action)
            self._finish()
        except BaseException as error:
            self._undo(error)
            raise
        if self._interleaved:
            # As upstream's interleaved schedule leaves it.
            last = self._placement.chunks - 1 if call.forward_only else 0
            self._state.set_virtual_pipeline_model_parallel_rank(last)
        if finalizes:
            self._schedules.finish_embedding_wgrad_compute(config, embedding)
            config.finalize_model_grads_func(
                call.model, self._tokens if config.calculate_per_token_loss else None
            )
        if timers is not None:
            timers("forward-backward").stop()
        return self._reports

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        given = self._taken(self._inputs, action)
        chunk = self._at(action)
        self._parameters.before_forward(chunk)
        splits = (stage, microbatch) in self._splits
        begin = None if self._times is None else self._times.begins(action)
        with finding_shared_weights() if splits else nullcontext():
            output, tokens = self._schedules.forward_step(
                self._call.forward_step_func,
                self._call.batches[chunk],
                self._call.model[chunk],
                self._call.num_microbatches,
                given,
                self._reports,
                self._config,
                self._call.collect_non_loss_data,
                self._checkpoints_all(stage, microbatch),
                self._schedules.check_first_val_step(
                    self._call.first_val_step, self._call.forward_only, microbatch == 0
                ),
                current_microbatch=microbatch,
            )
        self._tokens += tokens.item()
        if self._times is not None:
            self._times.computed(action, begin)
        if not self._call.forward_only:
            self._held[stage, microbatch] = given, output
            if self._shape is None:
                self._shapes[stage, microbatch] = output.shape
        sent = transfer_out(self._placement, action)
        if sent is not None:
            self._outgoing[sent] = output
        elif stage + 1 < self._placement.stages:
            # The next stage is on this rank: its input is this storage in a graph of its own.
            self._inputs[stage + 1, microbatch] = output.detach().requires_grad_()
            self._deallocate(output)

    def _backward(self, action: Action) -> None:
        stage, microbatch = at = action.stage, action.microbatch
        gradient = self._taken(self._gradients, action)
        given, output = self._held.pop(at)
        self._at(action)
        step = self._schedules.backward_step
        begin = None if self._times is None else self._times.begins(action)
        if at in self._splits:
            self._queues[at] = queue = DeferredWgrad()
            with deferred_wgrad(queue):
                gradient = step(given, output, gradient, self._model_type, self._config)
        else:
            gradient = step(given, output, gradient, self._model_type, self._config)
        if self._times is not None:
            self._times.computed(action, begin)
        self._recomputed_fully.pop(at, None)
        if given is None:
            return
        if gradient is None:
            gradient = torch.zeros_like(given)  # nothing that is trained depends on the input
        sent = transfer_out(self._placement, action)
        if sent is None:
            self._gradients[stage - 1, microbatch] = gradient
        else:
            self._outgoing[sent] = gradient

    def _weight_gradients(self, action: Action) -> None:
        # Until it is empty it is among those that an error discards.
        queue = self._queues[action.stage, action.microbatch]
        chunk = self._at(action)
        where = {"microbatch": action.microbatch, "chunk": chunk}
        begin = None if self._times is None else self._times.begins(action)
        with (
            events.span("microbatch", direction="backward", **where),
            events.span("backward", **where),
        ):
            queue.flush(len(queue))
        del self._queues[action.stage, action.microbatch]
        if self._times is not None:
            self._times.computed(action, begin)

    def _receive(self, action: Action) -> None:
        if action in self._receiving:
            return
        edge = self._edge(matching_send(action))
        if action.kind is Kind.RECV_B and self._shape is None:
            # A gradient has the shape of its output. Too early where there is none: the backward asks again.
            postponed = self._postponed.setdefault(edge, deque())
            if postponed or (action.stage, action.microbatch) not in self._shapes:
                postponed.append(action)
                return
        self._post_receive(edge, action)

    def _post_receive(self, edge: Edge, action: Action) -> None:
        shape = self._shape
        if action.kind is Kind.RECV_B and shape is None:
            shape = self._shapes.pop((action.stage, action.microbatch))
        with self._events.receive(action, self._size(shape), "start"):
            self._receiving[action] = self._transport.post_recv(
                edge, shape, self._config.pipeline_dtype, label=_label(matching_send(action))
            )

    def _receive_postponed(self, awaited: Action) -> None:
        """Receive what was postponed, up to ``awaited``. What is sent before it has its shape by now: its
        sender had the output."""
        edge = self._edge(matching_send(awaited))
        postponed = self._postponed.get(edge)
        while postponed and awaited not in self._receiving:
            self._post_receive(edge, postponed.popleft())
        if awaited not in self._receiving:
            self._post_receive(edge, awaited)

    def _send(self, action: Action) -> None:
        tensor = self._outgoing.pop(action)
        with_shape = action.kind is Kind.SEND_F and self._shape is None
        edge = self._edge(action)
        if self._times is not None:
            self._times.sent(action)
        with self._events.send(action, tensor.nbytes):
            sending = self._transport.post_send(edge, tensor, with_shape=with_shape, label=_label(action))
        self._last_sent[edge] = action, sending
        if action.kind is Kind.SEND_F and not self._call.forward_only:
            self._sending[action] = sending
            self._deallocate(tensor)

    def _reduce(self, action: Action) -> None:
        if self._reduction is not None:
            self._reduction.reduce(action.stage)

    def _finish(self) -> None:
        kept: list[Sized] = [self._inputs, self._gradients, self._held, self._queues, self._outgoing]
        left = sum(map(len, kept))
        if left:
            raise MtMegatronError(
                f"{left} tensor(s) are left over on pipeline rank {self._rank} at the end of the step; the "
                "schedule was not checked before it ran"
            )
        if self._reduction is not None:
            self._reduction.finish()
        for action, sending in self._last_sent.values():
            with self._events.drain(action):
                sending.wait()
        self._transport.finish()
        if self._random is not None:
            self._random.leave()
        if self._times is not None:
            self._times.end()

    def _undo(self, error: BaseException) -> None:
        # First, whatever else goes wrong: the peers wait.
        self._transport.abandon(error)
        for queue in self._queues.values():
            queue.discard()
        if self._reduction is not None:
            self._reduction.undo()
        if self._random is not None:
            self._random.undo()

    def _at(self, action: Action) -> int:
        """Megatron-Core's virtual rank and the random states of ``action``; its chunk."""
        chunk = self._placement.chunk(action.stage)
        if self._interleaved:
            self._state.set_virtual_pipeline_model_parallel_rank(chunk)
        if self._random is not None:
            self._random.enter(action.kind.value, action.stage, action.microbatch)
        return chunk

    def _taken(self, local: dict[tuple[int, int], Tensor], action: Action) -> Tensor | None:
        """What a forward or backward works on, once it is there: the stage's input, or its output's gradient;
        None at the ends of the pipeline."""
        end = 0 if action.kind is Kind.F else self._placement.stages - 1
        if action.stage == end:
            return None
        awaited = transfers_in(self._placement, action)
        if awaited is None:
            return local.pop((action.stage, action.microbatch))
        self._receive_postponed(awaited)
        begin = None if self._times is None else self._times.mark()
        with self._events.receive(awaited, self._size(self._shape), "wait"):
            found = self._receiving.pop(awaited).wait()
        if self._times is not None:
            self._times.waited(awaited, begin)
        if action.kind is Kind.F:
            return found.requires_grad_()
        # The answer to what was sent forward: that has arrived, and its memory can go.
        sending = self._sending.pop(Action(Kind.SEND_F, action.stage, action.microbatch), None)
        if sending is not None:
            sending.wait()
        return found

    def _deallocate(self, output: Tensor) -> None:
        if not self._call.forward_only:
            self._schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _checkpoints_all(self, stage: int, microbatch: int) -> bool | None:
        """Upstream's third argument of a forward step: whether all layers of this micro-batch are recomputed.
        Those up to ``num_microbatches_with_partial_activation_checkpoints`` in flight are not."""
        most = self._config.num_microbatches_with_partial_activation_checkpoints
        if most is None:
            return None
        in_flight = list(self._recomputed_fully.values())
        self._recomputed_fully[stage, microbatch] = in_flight.count(False) >= most
        return self._recomputed_fully[stage, microbatch]

    def _edge(self, sent: Action) -> Edge:
        """The queue of a SEND: outputs and gradients from one rank to another have one each."""
        source, target = (self._placement.rank(each) for each in (sent.stage, receiver_stage(sent)))
        lane = FORWARD if sent.kind is Kind.SEND_F else BACKWARD
        return Edge(self._ranks[source], self._ranks[target], lane)

    def _edges(self) -> set[Edge]:
        found = set()
        for action in self._actions:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                found.add(self._edge(action))
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                found.add(self._edge(matching_send(action)))
        return found

    def _boundary_shape(self) -> tuple[int, ...]:
        state, length = self._state, self._call.seq_length
        length //= state.get_context_parallel_world_size()
        if self._config.sequence_parallel:
            length //= state.get_tensor_model_parallel_world_size()
        return length, self._call.micro_batch_size, self._config.hidden_size

    def _size(self, shape: Sequence[int] | None) -> int:
        if shape is None:
            return -1
        return int(torch.Size(shape).numel()) * int(self._config.pipeline_dtype.itemsize)


class _ParameterSync:
    """Gathering of parameters that the configuration asks the schedule for: of the first two chunks at the
    step's begin, of each further one when the chunk before it begins."""

    def __init__(self, config: Any, call: StepCall, actions: Sequence[Action], placement: Placement) -> None:
        functions = config.param_sync_func
        # As upstream's: without chunks the first use of a parameter gathers it.
        self._starts = functions is not None and not call.forward_only and len(call.model) > 1
        if not self._starts:
            return
        self._functions = functions if isinstance(functions, (list, tuple)) else [functions] * len(call.model)
        self._model = call.model
        order = dict.fromkeys(placement.chunk(each.stage) for each in actions if each.kind is Kind.F)
        self._waiting = list(order)
        self._met: set[int] = set()

    def begin(self) -> None:
        if self._starts:
            self._next()

    def before_forward(self, chunk: int) -> None:
        if self._starts and chunk not in self._met:
            self._met.add(chunk)
            self._next()

    def _next(self) -> None:
        if self._waiting:
            chunk = self._waiting.pop(0)
            self._functions[chunk](self._model[chunk].parameters())


def _label(send: Action) -> Label:
    """Which message this is: ranks that run different orders notice it where messages have headers."""
    return Label(send.microbatch, send.stage, FORWARD if send.kind is Kind.SEND_F else BACKWARD)

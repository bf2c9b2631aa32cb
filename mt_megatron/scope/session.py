"""Watches a training from its first step to its last: statistics, requests, the sidecar, commands.

Nothing is installed between sampled steps. What fails is said in one line and ends what failed; training
goes on. Only ``start`` and ``attend`` communicate.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mt_megatron.backends.base import Backend
from mt_megatron.errors import MtMegatronError, ScopeError
from mt_megatron.host.machine import place_of
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout
from mt_megatron.scan.clock.machine import boot_id
from mt_megatron.scope.format.frames import VERSION
from mt_megatron.scope.interfaces import (
    Controlling,
    Facts,
    MakeSidecar,
    NoControl,
    Options,
    Sidecar,
    StepFigures,
)
from mt_megatron.scope.lab.agreement import gathered
from mt_megatron.scope.recording.files import scope_files
from mt_megatron.scope.recording.lock import hold
from mt_megatron.scope.sidecar.process import missing_for_page, sidecar_process
from mt_megatron.scope.watch.asked import Asked, Plan
from mt_megatron.scope.watch.defaults import Defaults
from mt_megatron.scope.watch.head import MOST_SEEN
from mt_megatron.scope.watch.outbox import Outbox
from mt_megatron.scope.watch.parameters import Norms, loss_scale
from mt_megatron.scope.watch.parts import Parts
from mt_megatron.scope.watch.requests import is_sampled, parse, parse_all, unknown
from mt_megatron.scope.watch.sampled_step import SampledStep
from mt_megatron.scope.watch.sender import Sender
from mt_megatron.scope.watch.shares import Place, module_rows
from mt_megatron.scope.watch.tensors import MOST_STEP, Tensors
from mt_megatron.seams import taps

logger = logging.getLogger("mt_megatron")

_TOLD_SECONDS = 3.0
"""For the last words of a sidecar that has ended, before a rank says it in its place."""


class Session:
    """One rank's watching. All methods belong to the training thread."""

    def __init__(
        self,
        run: Path | str,
        *,
        rank: int,
        layout: RankLayout,
        backend: Backend,
        chunks: Sequence[Any],
        optimizer: Any,
        options: Options,
        facts: Facts,
        say: Callable[[str], None] = logger.warning,
        sidecar: MakeSidecar | None = None,
        place: Coordinates | None = None,
    ) -> None:
        """Nothing happens before ``start``. ``run`` is the folder of the run, ``chunks`` this rank's model
        chunks, ``optimizer`` a ``MegatronOptimizer``, None where ``updating`` tells it later; ``say`` gets a
        line where something is worth one. ``sidecar`` None: the one of ``scope.sidecar``. ``place``: of this
        rank, where its groups are not in the order of ``layout``."""
        self.run = Path(run)
        self.control: Controlling = NoControl()
        """Set it before ``start``."""

        self._rank = rank
        self._layout = layout
        self._at = place or layout.coordinates(rank)
        self._backend = backend
        self._chunks = tuple(chunks)
        self._optimizer = optimizer
        self._options = options
        self._facts = facts
        self._say = say
        self._make_sidecar = sidecar or sidecar_process
        self._is_recorded = sidecar is None
        """True where its own sidecar writes to the folder, which no other run may hold then."""

        self._release: Callable[[], None] | None = None
        """Lets go of the folder; on rank 0."""

        self._sidecar: Sidecar | None = None
        self._outbox: Outbox | None = None
        self._device = backend.device(backend.current_device())
        self._on = False
        self._paths: list[str] = []
        """Modules of the whole model."""

        self._hello: dict[str, Any] = {}
        self._requesting = threading.Lock()
        self._texts: tuple[str, ...] | None = None
        """Requests that were heard and are not yet taken."""

        self._now = False
        """True where the next step is recorded by command, whatever its number; the same on all ranks."""

        self._said: set[str] = set()
        self._defaults: Defaults | None = None
        self._asked: Asked | None = None
        self._norms: Norms | None = None
        self._plans: list[Plan] = []
        self._step: SampledStep | None = None
        self._mark: str | None = None
        self._is_loss_summed = False
        self._not_finite = threading.Event()  # set while elements of sampled steps are not finite
        self._began = 0.0

    # Begin and end.

    def start(self) -> None:
        """Begin. Collective; at the same point of the program on every rank."""
        try:
            about = {**self._about(), "refusal": self._take_folder(), "problem": None}
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on, on all ranks alike
            about = {"problem": f"rank {self._rank}: {_reason(error)}"}
        everyone = gathered(about)
        problem = next((each["problem"] for each in everyone if each["problem"]), None)
        if problem is None:
            try:
                self._begin(everyone)
            except Exception as error:  # noqa: BLE001 - the same
                problem = f"rank {self._rank}: {_reason(error)}"
        sockets = gathered((problem, None if self._sidecar is None else str(self._sidecar.socket)))
        problems = [each for each, _ in sockets if each is not None]
        if problems:
            self.close()
            self._tell(f"nothing is recorded, training goes on: {problems[0]}")
            return
        self._on = True
        try:
            self._connect(sockets[self._leader(everyone)][1])
            self._take_requests(self._options.watch)
        except Exception as error:  # noqa: BLE001 - the others train, and would wait for this rank
            self._off(error)
        try:
            self.control.start()
        except Exception as error:  # noqa: BLE001 - the same
            self._failed(f"no commands are heard: {_reason(error)}")

    def _connect(self, path: str | None) -> None:
        if path is None:
            return
        sender = Sender(
            path, lambda: self._hello, heard=self._heard, say=self._failed, ended=self._recording_ended
        )
        sender.start()
        self._outbox = Outbox(sender, self._backend, tensor_parallel_size=self._layout.tp)

    def _take_folder(self) -> str | None:
        """Keep other runs out of the folder, on rank 0; a text says why that fails."""
        if self._rank == 0 and self._is_recorded:
            try:
                self._release = hold(scope_files(self.run), self._say)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                return _reason(error)
        return None

    def _about(self) -> dict[str, Any]:
        at = self._at
        named: Iterable[tuple[str, nn.Module]] = ()
        if (at.tp, at.cp) == (0, 0):
            # The others of its stage have the same modules, but for experts that are modules by themselves;
            # lists of all ranks would be long in large runs.
            named = (
                each
                for each in taps.named_modules(self._chunks)
                if at.dp == 0 or (at.dp < self._layout.ep and ".local_experts." in each[0])
            )
        return {
            "host": socket.gethostname(),
            "boot": boot_id(),
            "sockets": place_of(tempfile.gettempdir()),
            "session": f"{time.time_ns():x}",
            "paths": [path for path, _ in named if path],
        }

    def _leader(self, everyone: Sequence[Mapping[str, Any]]) -> int:
        """The first rank of this one's node."""
        nodes = [_node_of(each) for each in everyone]
        return nodes.index(nodes[self._rank])

    def _begin(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        # A sidecar writes to the folder as soon as it starts: on no node may it, where another run holds it.
        if everyone[0]["refusal"] is not None:
            raise ScopeError(everyone[0]["refusal"])
        nodes = list(dict.fromkeys(_node_of(each) for each in everyone))
        own = _node_of(everyone[self._rank])
        self._paths = list(dict.fromkeys(path for each in everyone for path in each["paths"]))
        layout, at, facts = self._layout, self._at, self._facts
        from megatron.core.utils import get_model_config

        core = get_model_config(self._chunks[0])
        self._is_loss_summed = bool(getattr(core, "calculate_per_token_loss", False))
        place = Place(
            layout=layout,
            at=at,
            sequence_parallel=bool(getattr(core, "sequence_parallel", False)),
            micro_batch_size=facts.micro_batch_size,
            seq_length=facts.seq_length,
            per_token_loss=self._is_loss_summed,
        )
        heads = int(getattr(core, "num_attention_heads", 1))
        self._defaults = Defaults(self._chunks, place, heads=heads, told=self._tap_failed)
        self._asked = Asked(
            self._chunks,
            place,
            heads=heads,
            samples=facts.global_batch_size,
            loss_scale=lambda: loss_scale(self._optimizer),
            told=self._tap_failed,
        )
        self._norms = Norms(self._chunks, place, vocab_size=facts.vocab_size, say=self._tell)
        if self._optimizer is not None:
            self._norms.hold(self._optimizer)
        self._hello = {
            "k": "hello",
            "v": VERSION,
            "rank": self._rank,
            "world_size": layout.world_size,
            "at": {name: getattr(at, name) for name in ("tp", "pp", "dp", "cp", "ep")},
            "layout": {
                **{name: getattr(layout, name) for name in ("tp", "pp", "dp", "cp", "ep")},
                "vpp": layout.vpp or 1,
            },
            "host": everyone[self._rank]["host"],
            "pid": os.getpid(),
            "session": everyone[0]["session"],
            "model": dict(facts.model),
            "modules": module_rows(self._chunks),
        }
        if self._leader(everyone) == self._rank:
            ranks = sum(_node_of(each) == own for each in everyone)
            self._start_sidecar(nodes.index(own), ranks)

    def _start_sidecar(self, node: int, ranks: int) -> None:
        port: int | None = None
        if self._options.live and self._rank == 0:
            if missing := missing_for_page():
                self._tell(
                    f"recorded in {self.run / 'scope'}; no live page without {', '.join(missing)}: "
                    "pip install 'mt_megatron[scope]'"
                )
            else:
                port = self._options.port
        sidecar = self._make_sidecar(
            self.run,
            node,
            ranks=ranks,
            retain_mib=self._options.retain_mib,
            port=port,
            sinks=self._options.sinks if self._rank == 0 else (),
            say=self._say if self._rank == 0 else logger.warning,
        )
        self._sidecar = sidecar
        sidecar.start()

    def close(self) -> None:
        """End everything. No collective; further calls do nothing."""
        self._on = False
        self._close_taps()
        for close in (self.control.close, self._end_outbox, self._end_sidecar):
            try:
                close()
            except Exception as error:  # noqa: BLE001 - the others are to be closed as well
                logger.warning("scope: %s: %s", type(error).__name__, error)

    def _end_outbox(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is None:
            return
        outbox.close()
        frames, size = outbox.dropped
        if frames and outbox.connected and self._sidecar is not None:
            self._say_here(
                f"{frames:,} frames ({size / 2**20:.1f} MiB) of rank {self._rank} were dropped: the sidecar "
                "did not take them in time"
            )

    def _end_sidecar(self) -> None:
        sidecar, self._sidecar = self._sidecar, None
        release, self._release = self._release, None
        try:
            if sidecar is not None:
                sidecar.close()
        finally:
            if release is not None:
                release()

    # One step.

    def begin_step(self, iteration: int) -> None:
        """``iteration`` begins; where it is sampled, taps are opened."""
        self._began = time.perf_counter()
        if not self._on:
            return
        self.control.begin_step(iteration)
        with self._requesting:
            texts, self._texts = self._texts, None
        if texts is not None:
            try:
                self._take_requests((*self._options.watch, *texts))
            except Exception as error:  # noqa: BLE001 - training goes on
                self._off(error)
        now, self._now = self._now, False
        self._open(iteration, now=now)

    def _open(self, iteration: int, *, now: bool = False) -> None:
        """Open the taps of ``iteration`` where it is sampled and somebody takes what is seen."""
        if self._outbox is None or self._outbox.ended or self._asked is None:
            return
        sampled = is_sampled(iteration, self._options.interval) or self._mark is not None
        plans = [each for each in self._plans if now or each.request.due(iteration, self._options.interval)]
        if not sampled and not plans:
            return
        # A step beside the run says nothing about its next one.
        parts = Parts(self._device, not_finite=None if self._mark else self._not_finite)
        step = SampledStep(iteration=iteration, sampled=sampled, parts=parts, tensors=Tensors())
        try:
            if sampled and self._defaults is not None:
                step.opened += self._defaults.open(step.parts)
            if plans and self._asked is not None:
                step.opened += self._asked.open(plans, step.tensors, step.parts)
        except Exception as error:  # noqa: BLE001 - training goes on
            step.close()
            self._off(error)
            return
        self._step = step

    def updating(self, optimizer: Any) -> bool:
        """``optimizer`` is about to update, in a program whose optimizer is not known at the start: norms are
        recorded of the first that has weights of the model. False for another one."""
        if self._optimizer is None and (self._norms is None or self._norms.hold(optimizer)):
            self._optimizer = optimizer
        return bool(self._optimizer == optimizer)

    def gradients_ready(self) -> None:
        """Gradients are reduced and unscaled, not yet clipped."""
        step = self._step
        if step is not None and step.sampled and self._norms is not None:
            self._guarded(lambda norms, parts: norms.gradients(parts), step)
            self._guarded(lambda norms, parts: norms.before_update(), step)

    def updated(self, *, skipped: bool) -> None:
        """The weights are those after the step, which left its update out where it ``skipped`` it."""
        step = self._step
        if step is not None and step.sampled and self._norms is not None:
            self._guarded(lambda norms, parts: norms.after_update(parts, skipped=skipped), step)
        if step is not None:
            step.close()  # what the model is called for until the next step is none of this one

    def end_step(self, iteration: int, figures: StepFigures | None) -> None:
        """``iteration`` is over; None: it raised an error, and what was seen of a part of it is left out.
        Closes the taps and hands over what was seen."""
        step = self._step
        self._close_taps()
        if not self._on:
            return
        self.control.end_step(iteration)
        if figures is None and self._asked is not None:
            self._asked.head.taken()
        if figures is None or self._outbox is None:
            return
        seconds = time.perf_counter() - self._began
        try:
            self._outbox.step(iteration, figures, seconds, self._perturbed)
            if step is not None:
                self._send(self._outbox, step, figures.tokens)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._off(error)

    def validated(self, iteration: int, *, loss: float, tokens: int) -> None:
        """The mean ``loss`` [nats] of the model after ``iteration`` over ``tokens`` of validation data."""
        if self._on and self._outbox is not None and self._rank == 0:
            self._outbox.validation(iteration, (loss * tokens, tokens), self._perturbed)

    def _send(self, outbox: Outbox, step: SampledStep, tokens: int | None) -> None:
        """Hand over what ``step`` saw; ``tokens`` of the global batch, None where nobody knows."""
        assert self._asked is not None
        if self._is_loss_summed:
            # Backward brings the gradient of the tokens' sum; only now the step knows how many they are.
            step.tensors.divide("gradient", tokens or None)
        outbox.stats(step.iteration, step.parts, self._perturbed)
        outbox.tensors(step.iteration, step.tensors, self._perturbed)
        seen, left_out = self._asked.head.taken()
        outbox.tokens(step.iteration, seen, self._perturbed, left_out=left_out)
        for what, size, most in (
            ("tensors", step.tensors.dropped, MOST_STEP),
            ("logits", left_out, MOST_SEEN),
        ):
            if size:
                self._once(
                    f"{what} of {size:,} bytes of step {step.iteration} are left out, and so in later steps: "
                    f"a rank sends at most {most // 2**20} MiB of them a step; ask for fewer modules, heads "
                    "or tokens",
                    kind=f"{what} left out",
                    anywhere=True,
                )

    # Requests and commands.

    @property
    def waiting(self) -> int:
        """Bytes that the sender has still to encode."""
        return 0 if self._outbox is None else self._outbox.waiting

    @property
    def dropped(self) -> tuple[int, int]:
        """Parcels and bytes of this rank that were dropped, since the sidecar did not take them in time."""
        return (0, 0) if self._outbox is None else self._outbox.dropped

    @property
    def is_on(self) -> bool:
        """Whether it has begun, on all ranks."""
        return self._on

    @property
    def wants_attention(self) -> bool:
        """Whether all ranks should call ``attend`` after the step under way; asked just before its
        reduction."""
        return self._on and self.control.wants_attention

    def attend(self) -> None:
        """Do what was commanded; collective, between two steps, once all ranks have agreed to."""
        self.control.attend()

    @contextmanager
    def around_step(self, step: int, mark: str) -> Iterator[None]:
        """Within it a step beside the run is sampled, and everything recorded is marked as perturbed by
        ``mark``; of one that raises an error nothing is sent."""
        self._mark = mark
        if self._outbox is not None:
            self._outbox.beside(step, mark)
        if self._on:
            self._open(step)
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            opened = self._step
            self._close_taps()
            try:
                if is_whole and self._on and opened is not None and self._outbox is not None:
                    self._send(self._outbox, opened, None)
            except Exception as error:  # noqa: BLE001 - training goes on
                self._off(error)
            finally:
                self._mark = None

    def went_back(self, step: int) -> None:
        """The run has gone back to the end of ``step``: what was recorded after it is undone."""
        if self._outbox is not None:
            self._outbox.back(step)

    def answer(self, result: Mapping[str, Any]) -> None:
        """Send a ``result`` frame."""
        if self._outbox is not None:
            self._outbox.frame({**result, "k": "result"}, must=True)

    def request(self, texts: Sequence[str]) -> None:
        """Watch ``texts`` from the next step on, besides those of the start; any thread."""
        with self._requesting:
            self._texts = tuple(texts)

    def handle_request(self, arguments: Mapping[str, Any]) -> list[str]:
        """The command ``request {texts}``: watch them, from the next step on, which is recorded whatever its
        number. Raises ``ConfigError`` for one that cannot be read."""
        texts = [str(each) for each in arguments.get("texts", ())]
        for text in texts:
            parse(text)
        self.request(texts)
        self._now = True
        return texts

    @property
    def _perturbed(self) -> str | None:
        return self._mark or self.control.lab.perturbed

    def _heard(self, frame: Mapping[str, Any]) -> None:
        """In the sender's thread."""
        kind = frame.get("k")
        if kind == "watch":
            texts = frame.get("requests")
            if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
                self.request(texts)
        elif kind == "command" and self._rank == 0:
            self.control.put(frame)

    def _take_requests(self, texts: Sequence[str]) -> None:
        requests, refused = parse_all(texts)
        for line in refused:
            self._once(line)
        if self._asked is None:
            return
        self._plans = []
        for request in requests:
            nowhere = unknown(request, self._paths)
            if nowhere is not None:
                self._once(nowhere)
                continue
            plan, problem = self._asked.plan(request, self._paths)
            if (beyond := self._asked.beyond(request)) is not None:
                self._once(beyond)
            if plan.targets:
                self._plans.append(plan)
            elif problem is not None:
                self._once(problem, anywhere=True)

    # What goes wrong.

    def _guarded(self, action: Callable[[Norms, Parts], None], step: SampledStep) -> None:
        if self._norms is None:
            return
        try:
            with torch.no_grad():
                action(self._norms, step.parts)
        except Exception as error:  # noqa: BLE001 - training goes on
            self._norms = None
            self._failed(f"norms are no longer recorded: {type(error).__name__}: {error}")

    def _close_taps(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.close()

    def _off(self, error: BaseException) -> None:
        self._close_taps()
        self._defaults = self._asked = self._norms = None
        self._plans = []
        self._failed(f"nothing more is recorded: {type(error).__name__}: {error}")

    def _tell(self, text: str) -> None:
        if self._rank == 0:
            self._say(f"scope: {text}")

    def _once(self, text: str, *, kind: str | None = None, anywhere: bool = False) -> None:
        """Say ``text`` once, or the first of a ``kind``; ``anywhere``: also what rank 0 does not know."""
        if (kind or text) in self._said:
            return
        self._said.add(kind or text)
        at = self._at
        if self._rank == 0:
            self._say(f"scope: {text}")
        elif anywhere and (at.tp, at.cp, at.dp) == (0, 0, 0):
            logger.warning("scope: rank %d: %s", self._rank, text)

    def _tap_failed(self, text: str) -> None:
        self._failed(f"a statistic is left out: {text}")

    def _failed(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say_here(f"rank {self._rank}: {text}; training goes on")

    def _recording_ended(self, reason: str) -> None:
        """In the sender's thread."""
        # Of an end of the sidecar one rank of the node says it, where the sidecar has not; that a rank does
        # not reach it no other one knows.
        sidecar, outbox = self._sidecar, self._outbox
        if sidecar is None and (outbox is None or not outbox.connected):
            self._say_here(
                f"nothing is recorded of rank {self._rank}: {reason}, or this rank does not see its socket; "
                "training goes on"
            )
        elif sidecar is not None and not sidecar.has_told(_TOLD_SECONDS):
            self._say_here(f"the recording ended: {reason}; training goes on")

    def _say_here(self, text: str) -> None:
        say = self._say if self._rank == 0 else logger.warning
        say(f"scope: {text}")


def _node_of(about: Mapping[str, Any]) -> tuple[str, str]:
    """Ranks with equal ones share a sidecar: they reach its socket."""
    return about["boot"], about["sockets"]


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, MtMegatronError) else f"{type(error).__name__}: {error}"

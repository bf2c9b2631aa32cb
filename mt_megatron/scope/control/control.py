"""Pause, step, resume: commands that all ranks follow at the same step boundary.

Rank 0 hears commands, from the sidecar or from the folder that ``commands`` describes. That it has some is
one rank's wish in the reduction that a step makes anyway; then every rank calls ``attend``, where rank 0
says what they are. A pause is a loop of small reductions, so that no collective waits long, the watchdog
sees the ranks move, and signals, checkpoints and the limit of time are heeded as between any two steps.
"""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.backends.threads import RankThread
from mt_megatron.errors import ConfigError, MtMegatronError
from mt_megatron.scope.control.commands import AT_ONCE, Command, Queue, Spool, command_from, identity_of
from mt_megatron.scope.control.ended_commands import EndedCommand
from mt_megatron.scope.lab.lab import Lab
from mt_megatron.scope.recording.audit import Audit
from mt_megatron.scope.recording.files import ScopeFiles
from mt_megatron.scope.trainer import Trainer
from mt_megatron.seams import collectives, events

logger = logging.getLogger("mt_megatron")

Handler = Callable[[Mapping[str, Any]], Any]

PERIOD_SECONDS = 0.5
"""Between two reductions of a pause: how late a rank's wish is heard at most. Commands are heard at once."""

LOOK_SECONDS = 0.5
"""Between two looks at the folder of commands."""

PAUSE_MINUTES = 30.0
"""A pause that no controller holds ends by itself after so long."""

_BY_ITSELF = "nobody"


class Control:
    """One rank's. ``begin_step``, ``end_step``, ``attend`` belong to the training thread, ``put`` to any."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        lab: Lab,
        folder: Path | None = None,
        say: Callable[[str], None] = logger.warning,
        answer: Callable[[Mapping[str, Any]], None] = lambda result: None,
        handlers: Mapping[str, Handler] | None = None,
        pause_minutes: float = PAUSE_MINUTES,
        period: float = PERIOD_SECONDS,
    ) -> None:
        """``folder``: RUN/scope; None: commands come by ``put`` alone. ``answer`` takes ``result`` frames,
        on rank 0. ``handlers`` of further commands are called on all ranks alike, between two steps."""
        self.lab = lab
        self.paused = False
        """Whether the run stands still by command; the same on all ranks."""

        self._trainer = trainer
        self._is_main = trainer.rank == 0
        self._folder = folder if self._is_main else None
        self._say = say if self._is_main else lambda text: None
        self._send = answer
        self._audit = Audit(None if self._folder is None else ScopeFiles(self._folder).audit, say)
        self._handlers: dict[str, Handler] = {**lab.handlers, "generate": self._generate, **(handlers or {})}
        self._pause_seconds = 60 * pause_minutes
        self._period = period
        self._queue = Queue()
        self._steps_left: int | None = None
        self._heard = time.monotonic()
        self._spool: Spool | None = None
        self._left: set[str] = set()
        """Commands that were left in the folder, where their answers go."""

        self._stopped = threading.Event()
        self._thread: RankThread | None = None

    def start(self) -> None:
        """Hear commands from now on. Local; where the folder cannot be used one line says so."""
        if self._folder is None or self._thread is not None:
            return
        spool = Spool(self._folder)
        try:
            spool.open()
        except OSError as error:
            self._say(f"scope: no commands are heard from {self._folder}/commands: {error}; training goes on")
            return
        self._spool = spool
        self._thread = RankThread(target=self._listen, name="scope-commands", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, the lab too; no collective."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LOOK_SECONDS + 5.0)
            self._thread = None
        self.lab.close()

    def put(self, command: Mapping[str, Any]) -> None:
        """Take a command on rank 0; what is wrong with it is answered."""
        identity = identity_of(command)
        try:
            checked = command_from(command)
            if checked.do in self._trainer.refused:
                raise ConfigError(f"found the command {checked.do}; {self._trainer.refused[checked.do]}")
            if checked.do != "status":  # A monitor that asks for it keeps no pause.
                self._heard = time.monotonic()
            if checked.do in AT_ONCE:
                self._answer(checked.id, self.status() if checked.do == "status" else None)
            else:
                self._queue.put(checked)
        except MtMegatronError as error:
            self._answer(identity, error=str(error))

    def status(self) -> dict[str, Any]:
        """What the run is told to do."""
        return {
            "paused": self.paused,
            "steps_left": self._steps_left,
            "step": self._trainer.iteration,
            "waiting": bool(self._queue),
            "refused": dict(self._trainer.refused),
            **self.lab.status(),
        }

    @property
    def wants_attention(self) -> bool:
        """Whether all ranks should call ``attend`` after the step under way; any rank's counts."""
        return bool(self._queue) or self._steps_left == 0 or self.lab.wants_attention

    def begin_step(self, step: int) -> None:
        """``step`` begins; on all ranks."""
        if self._steps_left:
            self._steps_left -= 1
        self.lab.begin_step(step)

    def end_step(self, step: int) -> None:
        """``step`` is over; on all ranks, before anything else runs the model."""
        self.lab.end_step(step)

    def attend(self) -> None:
        """Do what was commanded, and stand still while the run is paused. Collective, between two steps."""
        self.lab.attend()
        if self._steps_left == 0:
            self._steps_left = None
            self.paused = True
        given, _ = self._exchange(self._queue.take() if self._is_main else [], ())
        for command in given:
            self._do(command)
        if self.paused:
            self._stand_still()

    def _stand_still(self) -> None:
        trainer = self._trainer
        step = trainer.iteration
        self._heard = began = time.monotonic()
        self._audit.write("paused", step=step)
        self._say(
            f"scope: paused after step {step}; 'mt-megatron scope control "
            f"{'RUN' if self._folder is None else shlex.quote(str(self._folder.parent))} resume' or the page "
            f"lets it go on, and so do {self._pause_seconds / 60:g} minutes without anybody there"
        )
        self._tell_state()
        trainer.rest("paused by command")
        with events.span("pause", op="commanded"), trainer.aside():
            while self.paused:
                given, counts = self._exchange(self._next() if self._is_main else [], trainer.wishes())
                trainer.rest("paused by command")
                for command in given:
                    self._do(command)
                if trainer.heed(counts):
                    self.paused = False
        seconds = time.monotonic() - began
        self._audit.write("resumed", step=trainer.iteration, seconds=seconds)
        self._say(f"scope: goes on after step {trainer.iteration}, paused for {seconds:.1f} s")
        self._tell_state()

    def _next(self) -> list[Command]:
        """Commands of the next round; an end of the pause where nobody has held it for long."""
        commands = self._queue.take(self._period)
        if not commands and time.monotonic() - self._heard > self._pause_seconds:
            self._say(
                f"scope: nobody has held the pause for {self._pause_seconds / 60:g} minutes: training goes on"
            )
            return [Command(id=_BY_ITSELF, do="resume")]
        return commands

    def _exchange(
        self, commands: Sequence[Command], wishes: Sequence[bool]
    ) -> tuple[list[Command], list[int]]:
        """Rank 0's commands and how many ranks have each wish, on every rank; collective."""
        text = json.dumps([each.to_dict() for each in commands]).encode() if commands else b""
        own = [float(len(text)), *map(float, wishes)]
        length, *counts = (round(each) for each in self._trainer.sum_over_ranks(own))
        if not length:
            return [], counts
        if dist.is_initialized() and dist.get_world_size() > 1:
            text = self._broadcast(text, length)
        return [command_from(each) for each in json.loads(text)], counts

    def _broadcast(self, text: bytes, length: int) -> bytes:
        device = self._trainer.backend.device(self._trainer.backend.current_device())
        data = torch.zeros(length, dtype=torch.uint8)
        if text:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        data = data.to(device)
        with collectives.announced("broadcast", "world", None, data):
            dist.broadcast(data, src=0)
        return bytes(data.cpu().numpy().tobytes())

    def _do(self, command: Command) -> None:
        """Follow ``command``; on all ranks. What only some of them cannot do is an error for all. Raises
        MtMegatronError where the others are left in the middle of it."""
        value, problem = None, None
        failure: Exception | None = None
        ended = EndedCommand(command.do)
        try:
            value = self._follow(command)
        except MtMegatronError as error:
            problem, failure = str(error), error
        except Exception as error:  # a command must not end a run
            logger.exception("scope: the command %s", command.do)
            problem, failure = f"{type(error).__name__}: {error}", error
        ended.tell()
        if failure is not None:
            ended.require_all(failure)
        (failed,) = self._trainer.sum_over_ranks([float(problem is not None)])
        ended.forget()
        if failed and problem is None:
            problem = f"{command.do} failed on another rank; its log says why"
        if self._is_main:
            self._audit.write(
                "command", step=self._trainer.iteration, id=command.id, do=command.do, error=problem or ""
            )
            self._answer(command.id, value, error=problem)
            self._tell_state()

    def _follow(self, command: Command) -> Any:
        if command.do == "pause":
            self.paused, self._steps_left = True, None
        elif command.do == "resume":
            self.paused, self._steps_left = False, None
        elif command.do == "step":
            self.paused, self._steps_left = False, int(command.arguments.get("n", 1))
        elif command.do in self._handlers:
            return self._handlers[command.do](command.arguments)
        else:
            raise ConfigError(f"found the command {command.do}, which this run does not take")
        return {"paused": self.paused, "steps_left": self._steps_left, "step": self._trainer.iteration}

    def _generate(self, arguments: Mapping[str, Any]) -> Any:
        from mt_megatron.scope.control.generate import generate

        def is_over() -> bool:
            return self._is_main and self._queue.holds(("resume", "step"))

        return generate(self._trainer, arguments, told=self._tell_token, is_over=is_over)

    def _tell_token(self, value: Mapping[str, Any]) -> None:
        if self._is_main:
            self._send({"k": "result", "id": "token", "ok": True, "value": dict(value)})

    def _tell_state(self) -> None:
        if self._is_main:
            self._send({"k": "result", "id": "state", "ok": True, "value": self.status()})

    def _answer(self, identity: str, value: Any = None, *, error: str | None = None) -> None:
        result: dict[str, Any] = {"k": "result", "id": identity, "ok": error is None}
        result |= {"value": value} if error is None else {"error": error}
        self._send(result)
        if self._spool is not None and identity in self._left:
            # The page has its answers from the sidecar, and an answer may have millions of numbers.
            self._left.discard(identity)
            self._spool.answer(identity, result)

    def _listen(self) -> None:
        spool = self._spool
        assert spool is not None
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                for each in spool.look():
                    self._left.add(identity_of(each))
                    self.put(each if isinstance(each, Mapping) else {"do": each})
            except Exception as error:  # noqa: BLE001 - listening never ends training
                logger.warning("scope: a command cannot be read: %s: %s", type(error).__name__, error)

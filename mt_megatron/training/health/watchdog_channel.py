"""How the watchdogs of all ranks talk: a few keys in the job's store, over a connection of their own.

The main thread may wait in its own connection to the store for as long as it likes, so this is another
one, and only one thread uses it. A request that is never answered (the store's own process stopped)
blocks that thread and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from mt_megatron.training.health.watchdog_evidence import Evidence, Sign, evidence_from, sign_of_life, verdict

_POLL_SECONDS = 0.1
_SECONDS_TO_READ = 10.0
_generation = 0


class Channel:
    """One rank's end. Methods block and may raise ``RuntimeError`` when the store is gone."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Collective in so far as every rank has to make its channels in the same order."""
        global _generation
        _generation += 1
        self.rank = rank
        self.world_size = world_size
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"mt_megatron/watchdog/{restart}/{_generation}", _connection())
        self.beat(sign_of_life("starting"))
        self.store_owner = Sign(**json.loads(self._store.get("sign/0")))
        """Rank 0, in whose process the store is unless a launcher keeps it."""

    def beat(self, sign: Sign) -> None:
        """Leave a sign of life."""
        self._store.set(f"sign/{self.rank}", json.dumps(asdict(sign)))

    def sign(self, rank: int) -> Sign | None:
        """The last sign of life of ``rank``."""
        text = self._read(f"sign/{rank}")
        return None if text is None else Sign(**json.loads(text))

    def alarm(self) -> str | None:
        """Why some rank raised the alarm; None when none did."""
        return self._read("alarm")

    def leave(self, reason: str) -> None:
        """Say that this rank ends with an error."""
        self._store.set(f"left/{self.rank}", reason)
        self._store.compare_set("alarm", "", json.dumps({"rank": self.rank, "left": True}))

    def raise_alarm(self) -> None:
        """Call all ranks to say where they are."""
        self._store.compare_set("alarm", "", json.dumps({"rank": self.rank, "left": False}))

    def confer(self, own: Evidence, patience: float) -> tuple[str, list[Sign]]:
        """Give ``own`` evidence and get the verdict of the rank that asks all others, which is the first
        to come here. Takes up to ``patience`` seconds. Also returns who did not answer."""
        self._store.set(f"evidence/{self.rank}", own.to_json())
        speaker = self._store.compare_set("speaker", "", str(self.rank)).decode()
        if speaker == str(self.rank):
            return self._ask_all(patience)
        deadline = time.monotonic() + patience + _SECONDS_TO_READ
        while time.monotonic() < deadline:
            said = self._read("verdict")
            if said is not None:
                told = json.loads(said)
                text: str = told["text"]
                self._have_read(told["readers"])
                # Once per node is enough to read.
                whole = os.environ.get("LOCAL_RANK", "0") == "0"
                return text if whole else text.partition("\n")[0], []
            time.sleep(_POLL_SECONDS)
        return verdict({self.rank: own}, {}, {}, self.world_size), []

    def _ask_all(self, patience: float) -> tuple[str, list[Sign]]:
        found: dict[int, Evidence] = {}
        left: dict[int, str] = {}
        deadline = time.monotonic() + patience
        while len(found) + len(left) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                if rank not in found and (text := self._read(f"evidence/{rank}")) is not None:
                    found[rank] = evidence_from(text)
                if rank not in found and (reason := self._read(f"left/{rank}")) is not None:
                    left[rank] = reason
            time.sleep(_POLL_SECONDS)
        missing = [rank for rank in range(self.world_size) if rank not in found]
        signs = {rank: sign for rank in missing if (sign := self.sign(rank)) is not None}
        text = verdict(found, signs, left, self.world_size)
        self._store.set("verdict", json.dumps({"text": text, "readers": list(found)}))
        self._have_read(list(found))
        return text, [sign for rank, sign in signs.items() if rank not in left]

    def _have_read(self, readers: list[int]) -> None:
        """Say that this rank knows the verdict. Rank 0, in whose process the store may be, leaves last."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"read/{self.rank}", "")
            deadline = time.monotonic() + _SECONDS_TO_READ
            keys = [f"read/{rank}" for rank in readers]
            while self.rank == 0 and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def _read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text


def _connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store
    return TCPStore(
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )

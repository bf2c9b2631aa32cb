"""The ranks' side: a command that fails on the last rank alone, with the first one in it or not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.errors import MtMegatronError
from mt_megatron.scope.control import ended_commands
from tests.scope.control.test_control import Counting, Run


class Together(Counting):
    """A trainer that only counts, over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = dist.get_rank()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()  # type: ignore[no-any-return]


def failing(seconds: float) -> dict[str, Any]:
    """Results on this rank of commands that fail at their end and in the middle; one that failed waits
    ``seconds`` for the other."""
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()
    ended_commands.SECONDS = seconds
    failed = dist.get_rank() == dist.get_world_size() - 1

    def at_its_end(arguments: Any) -> str:
        dist.barrier()
        if failed:
            raise MemoryError("no room")
        return "made"

    def in_the_middle(arguments: Any) -> str:
        if failed:
            raise MemoryError("no room")
        # As in a collective that the other rank never comes to.
        store.wait(["given up"], timedelta(seconds=60))
        return "made"

    run = Run(trainer=Together(), pair=at_its_end, generate=in_the_middle)
    found: dict[str, Any] = {}
    before = next(ended_commands._numbers)
    for name, do in (("at its end", "pair"), ("in the middle", "generate"), ("after it", "pair")):
        identity = "" if dist.get_rank() else run.put(do)
        try:
            run.control.attend()
            found[name] = None if dist.get_rank() else dict(run.answer(identity))
        except MtMegatronError as error:
            found[name] = str(error)
            # The run would end here; the other rank is let out of the command instead.
            store.set("given up", b"")
            run.trainer.sum_over_ranks([1.0])
    keys = [f"mt_megatron/scope/command/{before + number}/{dist.get_rank()}" for number in (1, 2, 3)]
    found["keys"] = [store.check([key]) for key in keys]
    dist.destroy_process_group()
    return found

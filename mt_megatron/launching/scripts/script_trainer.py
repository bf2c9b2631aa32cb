"""Adapter from an unmodified script to ``mt_megatron.scope.trainer.Trainer``, for pause and lab."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from mt_megatron.backends.base import Backend
from mt_megatron.errors import ScopeError
from mt_megatron.parallel.rank_layout import Coordinates, RankLayout, rank_of_world
from mt_megatron.seams import collectives
from mt_megatron.seams.taps.names import unwrapped

_REFUSED: Mapping[str, str] = {
    "undo": "a script cannot go back to an earlier step; load a checkpoint of its own from before it",
    "pair": "a script cannot make a step beside the run; train twice, once under the perturbation",
    "step": "a script is not led step by step; pause it and resume it",
    "generate": "a script does not say how its model makes text; generate from a checkpoint of it",
}


class Ranks:
    """This process among the ranks, and the Gloo group by which they agree; made on all of them together."""

    def __init__(self) -> None:
        self.rank, self.world_size = rank_of_world()
        self._group: Any = dist.new_group(backend="gloo") if self.world_size > 1 else None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64; collective."""
        total = torch.tensor(values, dtype=torch.float64)
        if self._group is not None:
            with collectives.announced("all_reduce", "world", self._group, total):
                dist.all_reduce(total, group=self._group)
        summed: list[float] = total.tolist()
        return summed

    def close(self) -> None:
        """End the group, where torch has not ended it with all others; no collective."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


class ScriptTrainer:
    """One rank of a script; ``launching.scripts.recording`` sets what changes from step to step."""

    refused = _REFUSED
    tokenizer = None

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        backend: Backend,
        layout: RankLayout,
        at: Coordinates,
        *,
        seq_length: int,
        micro_batch_size: int,
    ) -> None:
        """``model``: as the script gives it to a schedule, one chunk or several."""
        from megatron.core.utils import get_model_config

        self.chunks: Sequence[Any] = list(model) if isinstance(model, list | tuple) else [model]
        self.core: Any = get_model_config(self.chunks[0])
        self.optimizer: Any = None
        """None before its first update."""

        self.scheduler: Any = None
        """None where the script has none of Megatron-Core's."""

        self.iteration = 0
        self.rank = ranks.rank
        self.backend, self.layout, self.at = backend, layout, at
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.sum_over_ranks = ranks.sum

    def facts(self) -> dict[str, Any]:
        """Name, sizes and precision of the model."""
        core, bare = self.core, self.bare_chunks()[0]
        return {
            "name": type(bare).__name__,
            "num_layers": core.num_layers,
            "hidden_size": core.hidden_size,
            "num_attention_heads": core.num_attention_heads,
            "num_query_groups": core.num_query_groups,
            "num_experts": core.num_moe_experts,
            "vocab_size": getattr(bare, "vocab_size", None),
            "seq_length": self.seq_length,
            "micro_batch_size": self.micro_batch_size,
            "params_dtype": str(core.params_dtype).removeprefix("torch."),
        }

    def bare_chunks(self) -> list[torch.nn.Module]:
        return [unwrapped(chunk) for chunk in self.chunks]

    def rest(self, where: str) -> None:
        pass

    def wishes(self) -> tuple[bool, ...]:
        # Megatron-LM's --exit-signal-handler ends the run after the step; a pause would keep it from that.
        handler = megatron_lm("_GLOBAL_SIGNAL_HANDLER")
        return (bool(getattr(handler, "_signal_received", False)),)

    def heed(self, counts: Sequence[int]) -> bool:
        return counts[0] > 0

    def remember(self) -> NoReturn:
        raise ScopeError(f"found a request to go back or to rehearse; {self.refused['undo']}")

    rehearse = remember

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


def megatron_lm(name: str) -> Any:
    """A global variable of Megatron-LM; None in other scripts."""
    return getattr(sys.modules.get("megatron.training.global_vars"), name, None)

"""A linear that every tensor-parallel rank holds whole: MLA's projections down to the latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from torch import Tensor

from mt_megatron.errors import ConfigError


class ReplicatedLinear(torch.nn.Module):
    """``input @ weight.T`` with ``weight`` [output_size, input_size], the same on all ranks.

    A latent is small and the same for all heads. Splitting its projection over the ranks (as
    Megatron-Core 0.12 does) saves its weight and products, and costs a gather in front of each norm;
    here each rank computes it, and nothing is sent.

    Gradients: without sequence parallelism every rank sees all tokens, and gets the whole gradient if
    what follows gives whole gradients (a ColumnParallelLinear does). Under sequence parallelism a
    rank sees its share of the tokens; the weight is marked ``sequence_parallel``, so that
    ``finalize_model_grads`` sums the gradients. The weight is drawn from random numbers that the ranks
    share. GEMMs go through ``seams.gemm``; arguments are those of ColumnParallelLinear.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        super().__init__()
        if bias or is_expert:
            raise ConfigError(
                f"a replicated linear was asked for with bias={bias} and is_expert={is_expert}; expected "
                "neither: use ColumnParallelLinear"
            )
        self.config = config
        self.input_size, self.output_size = input_size, output_size
        # As upstream's layers choose it: on the host, or where the caller's context says, or on the device.
        place = {} if config.use_cpu_initialization else {"device": layers.torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(
            layers.torch.empty(output_size, input_size, dtype=config.params_dtype, **place)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            self._initialise(init_method)

    def _initialise(self, init_method: Callable[[Tensor], Any]) -> None:
        if self.config.use_cpu_initialization:
            # In fp32 and from the default generator, which upstream's layers also advance alike on all ranks.
            drawn = torch.empty(self.output_size, self.input_size, dtype=torch.float32)
            init_method(drawn)
            self.weight.data.copy_(drawn)
            return
        with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
            init_method(self.weight)

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        """[..., input_size] -> [..., output_size], and no bias."""
        arguments = {
            "input": input,
            "weight": self.weight,
            "bias": None,
            "gradient_accumulation_fusion": self.config.gradient_accumulation_fusion,
            "sequence_parallel": False,
            "allreduce_dgrad": False,
        }
        # By name at each call: whoever patches these functions patches this layer.
        output: Tensor
        if self.weight.requires_grad:
            output = layers.linear_with_grad_accumulation_and_async_allreduce(**arguments)
        else:
            # Upstream wants the older name of allreduce_dgrad too, here alone.
            output = layers.linear_with_frozen_weight(**arguments, async_grad_allreduce=False)
        return output, None

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.output_size}"

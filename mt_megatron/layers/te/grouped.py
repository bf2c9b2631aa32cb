"""The linears of a rank's experts, one after another, with a weight of its own for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from mt_megatron.errors import ConfigError
from mt_megatron.layers.mla.spec import linear_of_rank
from mt_megatron.layers.te.names import MODULE


class TEGroupedLinear(torch.nn.Module):
    """``num_gemms`` linears for rows that are grouped by expert.

    Parameters are ``weight0`` [outputs, inputs of this rank] to ``weight{num_gemms - 1}``, with ``bias`` also
    ``bias0`` and so on. They are drawn, marked and split over ranks as those of the local linear of an
    expert. Nothing is communicated here: token dispatchers do that. Products go through ``seams.gemm``.

    Raises ValueError for another ``parallel_mode`` than ``column`` and ``row``, and ConfigError for linears
    of no expert that are split over ranks.
    """

    __module__ = MODULE

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode not in ("column", "row"):
            raise ValueError(f"parallel_mode is {parallel_mode!r}; expected column or row")
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        if ranks > 1 and not is_expert:
            raise ConfigError(
                f"grouped linears with is_expert=False over {ranks} tensor-parallel ranks; expected "
                "is_expert=True, whose token dispatcher communicates"
            )
        self.config, self.num_gemms = config, num_gemms
        self.use_bias, self.te_return_bias = bias, bias and skip_bias_add
        self._split_axes = {"weight": 0, "bias": 0} if parallel_mode == "column" else {"weight": 1}
        given = {"config": config, "init_method": init_method, "bias": bias, "is_expert": is_expert}
        for number in range(num_gemms):
            if parallel_mode == "column":
                one = ColumnParallelLinear(input_size, output_size, skip_bias_add=True, **given)
            else:
                one = RowParallelLinear(
                    input_size, output_size, input_is_parallel=True, skip_bias_add=True, **given
                )
            self.register_parameter(f"weight{number}", one.weight)
            if bias:
                self.register_parameter(f"bias{number}", one.bias)
        self.register_load_state_dict_pre_hook(_allow_no_extra_state)  # type: ignore[no-untyped-call]

    @property
    def weights(self) -> list[Tensor]:
        """The experts' weights in their order."""
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    def forward(self, input: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """[rows, inputs] -> [rows, outputs of this rank], ``m_splits`` rows of each expert in turn.

        The bias is None, or where it is not added [rows, outputs], each row's.
        """
        fusion = bool(self.config.gradient_accumulation_fusion)
        output = torch.cat(
            [
                linear_of_rank(rows, weight, gradient_accumulation_fusion=fusion)
                for rows, weight in zip(input.split(m_splits), self.weights, strict=True)
            ]
        )
        if not self.use_bias:
            return output, None
        bias = torch.cat(
            [getattr(self, f"bias{number}").expand(rows, -1) for number, rows in enumerate(m_splits)]
        )
        return (output, bias) if self.te_return_bias else (output + bias, None)

    def get_extra_state(self) -> None:
        """Nothing: FP8 state is kept by a layer's projection. Checkpoints have room for it."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Every expert's tensors under the keys and offsets of ``SequentialMLP``'s."""
        first = parallel_state.get_expert_model_parallel_rank() * self.num_gemms
        everyone = parallel_state.get_expert_model_parallel_world_size() * self.num_gemms
        copy = parallel_state.get_data_modulo_expert_parallel_rank(with_context_parallel=True)
        state: dict[str, Any] = {}
        for number, weight in enumerate(self.weights):
            held = {"weight": weight, "_extra_state": None}
            if self.use_bias:
                held["bias"] = getattr(self, f"bias{number}")
            offsets = (*sharded_offsets, (len(sharded_offsets), first + number, everyone))
            made = make_sharded_tensors_for_checkpoint(held, prefix, self._split_axes, offsets)
            for name in held:
                sharded = made[f"{prefix}{name}"]
                sharded.replica_id = (*sharded.replica_id[:2], copy)
                suffix = "" if name == "_extra_state" and number == 0 else number
                state[f"{prefix}{name}{suffix}"] = sharded
        return state


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """Grouped linears whose outputs are split over the tensor-parallel ranks."""

    __module__ = MODULE

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, is_expert: bool, **given: Any):
        super().__init__(
            num_gemms, input_size, output_size, parallel_mode="column", is_expert=is_expert, **given
        )


class TERowParallelGroupedLinear(TEGroupedLinear):
    """Grouped linears whose inputs are split over the tensor-parallel ranks."""

    __module__ = MODULE

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, is_expert: bool, **given: Any):
        super().__init__(
            num_gemms, input_size, output_size, parallel_mode="row", is_expert=is_expert, **given
        )


def _allow_no_extra_state(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    state.setdefault(f"{prefix}_extra_state")

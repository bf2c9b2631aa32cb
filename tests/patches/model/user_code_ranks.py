"""What code of users does around the patched layers in one process: checkpointing, autocast, subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.patches.model.router_ranks import start

HIDDEN, EXPERTS, TOKENS = 16, 4, 12


def config_of(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    return TransformerConfig(**{**values, **options})


def layer_of(kind: Any = None, **options: Any) -> Any:
    """An MoE layer (of the class ``kind``) with the same weights each time."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    torch.manual_seed(3)
    config = config_of(**options)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=config.moe_grouped_gemm)
    layer = (kind or MoELayer)(config, spec.submodules.mlp.submodules, layer_number=1)
    layer.set_layer_number(1)
    for number, parameter in enumerate(layer.parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.data.copy_(drawn * 0.2)
    return layer


def tokens_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(5))
    return drawn.to(dtype).requires_grad_()


def attempt(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or its error's name and text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


LOSSES: dict[str, dict[str, Any]] = {
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z": {"moe_z_loss_coeff": 0.1},
}


def checkpointing() -> dict[str, Any]:
    """For each loss and way of recomputation: gradients of the router, tokens that the bias counts, and
    the values that are tracked for the log."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import checkpoint as megatrons
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    from mt_megatron.layers.moe.router import listen

    biased = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "once": lambda layer, tokens: layer(tokens)[0],
        "torch": lambda layer, tokens: checkpoint(lambda x: layer(x)[0], tokens, use_reentrant=False),
        "torch reentrant": lambda layer, tokens: checkpoint(
            lambda x: layer(x)[0], tokens, use_reentrant=True
        ),
        "megatron": lambda layer, tokens: megatrons(lambda x: layer(x)[0], False, tokens),
    }
    found: dict[str, Any] = {}
    for loss, options in LOSSES.items():
        for way, run in ways.items():

            def step(options: Any = options, run: Any = run) -> Any:
                layer, tokens = layer_of(**biased, **options), tokens_of()
                load = listen(layer.router)
                clear_aux_losses_tracker()
                (run(layer, tokens) * 0.0).sum().backward()
                tracker = parallel_state.get_moe_layer_wise_logging_tracker()
                return {
                    "gradient": layer.router.weight.grad.tolist(),
                    "tokens": int(layer.router.local_tokens_per_expert.sum()),
                    "tracked": {name: each["values"].tolist() for name, each in tracker.items()},
                    "load": load.take(),
                }

            found[f"{loss} {way}"] = attempt(step)
    return found


def everything() -> dict[str, Any]:
    start()
    return {"checkpointing": checkpointing()}

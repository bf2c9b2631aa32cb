"""What one process finds about the patched router, and about upstream's; JSON-able results."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

EXPERTS, HIDDEN = 8, 16
WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "histc", "is_nonzero", "unique")
"""Operations for which a device has to be waited for, or that only some devices have for integers."""


def start(*, without: str | None = None) -> None:
    import mt_megatron
    from mt_megatron.patches import collect

    features = None
    if without is not None:
        from mt_megatron.backends import registry

        features = {patch.feature for patch in collect(registry.get("cpu"))} - {without}
    mt_megatron.patch("cpu", features=features)
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def router_of(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "use_cpu_initialization": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    router = TopKRouter(TransformerConfig(**{**values, **options}))
    router.set_layer_number(1)
    weight = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
    router.weight.data = weight.to(router.weight.dtype)
    return router


BIASED: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

KEPT: dict[str, dict[str, Any]] = {
    "plain": {"moe_router_load_balancing_type": "none"},
    "aux": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.1},
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_aux_loss_coeff": 0.1},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
}


def hidden(dtype: torch.dtype = torch.float32, tokens: int = 32) -> torch.Tensor:
    drawn = torch.randn(tokens // 2, 2, HIDDEN, generator=torch.Generator().manual_seed(2))
    return drawn.to(dtype).requires_grad_()


def of_090() -> dict[str, Any]:
    """Weights, experts and gradients of options that 0.9.0 has; padded ones as sets of pairs."""
    found: dict[str, Any] = {}
    for name, options in KEPT.items():
        for dtype in (torch.float32, torch.bfloat16):
            router = router_of(**options, params_dtype=dtype)
            tokens = hidden(dtype)
            probs, indices = router(tokens)
            if name == "padded":
                # Which tokens pad an expert, at weight 0, is nobody's promise; nor is the order.
                pairs = zip(indices.tolist(), probs.tolist(), strict=True)
                rows: Any = [sorted((token, p) for token, p in zip(*row, strict=True) if p) for row in pairs]
                (probs**2).sum().backward()
            else:
                rows = [indices.tolist(), probs.tolist()]
                (probs * torch.linspace(1, 2, probs.numel()).view_as(probs)).sum().backward()
            gradients = [router.weight.grad.tolist(), tokens.grad.tolist()]
            found[f"{name} {dtype}"] = {"rows": rows, "gradients": gradients}
        found[f"{name} names"] = sorted(router.state_dict())
    return found


def dropped_by_position() -> list[int]:
    """Tokens that an expert for whom all compete takes, by upstream's own function."""
    from megatron.core.transformer.moe.moe_utils import topk_softmax_with_capacity

    logits = torch.zeros(64, 2)
    logits[:, 0] = 5.0
    probs, indices, _ = topk_softmax_with_capacity(
        logits, 1, capacity_factor=0.5, drop_policy="position", use_pre_softmax=True
    )
    kept: list[int] = (indices.flatten() == 0).nonzero().flatten().tolist()
    return kept


def one_expert_alone() -> str:
    """The error of ``topk_softmax_with_capacity`` for the softmax of one logit; empty when there is none."""
    from megatron.core.transformer.moe.moe_utils import topk_softmax_with_capacity

    from mt_megatron.errors import ConfigError

    try:
        topk_softmax_with_capacity(torch.zeros(4, 4), 1)
    except (ConfigError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_expert() -> dict[str, Any]:
    """Weights and warnings of routers with topk 1: two by the softmax of the chosen, after two others."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mt_megatron").addHandler(handler)
    for options in ({"moe_router_pre_softmax": True}, {"moe_router_load_balancing_type": "sinkhorn"}):
        router_of(moe_router_topk=1, **options)
    others = list(said)
    weights = [router_of(moe_router_topk=1)(hidden())[0] for _ in range(2)]
    logging.getLogger("mt_megatron").removeHandler(handler)
    return {
        "others": others,
        "said": said,
        "weights": torch.cat(weights).unique().tolist(),
        "alone": one_expert_alone(),
    }


class Operations(TorchDispatchMode):
    """Counts the operations of ``WAITING``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def waits(**options: Any) -> list[str]:
    router = router_of(**options)
    with Operations() as operations:
        probs, _ = router(hidden())
        probs.sum().backward()
    return sorted(set(operations.seen))


def upstream() -> dict[str, Any]:
    start(without="moe")
    from megatron.core.transformer.moe.moe_utils import topk_softmax_with_capacity

    topk_softmax_with_capacity(torch.zeros(4, 4), 2)
    return {
        "kept": of_090(),
        "position": dropped_by_position(),
        "waits": waits(deterministic_mode=True, moe_aux_loss_coeff=0.1),
        "alone": one_expert_alone(),
    }


def casts() -> dict[str, Any]:
    """The bias's type and value under every cast, beside the weight's type."""
    from megatron.core.transformer.module import Float16Module

    value = 0.5 + 2.0**-20
    found: dict[str, Any] = {"value": value}

    def look(name: str, router: Any) -> None:
        found[name] = [
            str(router.expert_bias.dtype),
            router.expert_bias.tolist() == [value] * EXPERTS,
            str(router.local_tokens_per_expert.dtype),
            str(router.weight.dtype),
        ]

    for name in ("bfloat16", "half", "double", "float"):
        router = router_of(**BIASED)
        router.expert_bias.fill_(value)
        getattr(torch.nn.Sequential(router), name)()
        look(name, router)
    router = router_of(**BIASED, bf16=True, params_dtype=torch.bfloat16)
    router.expert_bias.fill_(value)
    Float16Module(router.config, router)
    look("Float16Module", router)
    router.to("meta")
    found["meta"] = [str(router.expert_bias.dtype), str(router.expert_bias.device)]
    return found


def in_fp32() -> dict[str, Any]:
    """Logits of a model in bf16 with ``moe_router_dtype``, and what backward keeps and gives."""
    router = router_of(params_dtype=torch.bfloat16, moe_router_dtype="fp32", **BIASED)
    tokens = hidden(torch.bfloat16)
    kept: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(str(tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = router.gating(tokens)
    reference_tokens = tokens.detach().float().requires_grad_()
    reference_weight = router.weight.detach().float().requires_grad_()
    reference = torch.nn.functional.linear(reference_tokens, reference_weight)
    slope = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits * slope).sum().backward()
    (reference * slope).sum().backward()
    assert reference_tokens.grad is not None and reference_weight.grad is not None
    return {
        "logits": [str(logits.dtype), torch.equal(logits, reference)],
        "kept": sorted(set(kept)),
        "hidden": torch.equal(tokens.grad, reference_tokens.grad.bfloat16()),
        "weight": torch.equal(router.weight.grad, reference_weight.grad.bfloat16()),
        "plain": str(router_of(params_dtype=torch.bfloat16).gating(tokens).dtype),
        "probs": str(router(tokens)[0].dtype),
    }


def scales() -> dict[str, float]:
    """What a schedule leaves as the scale of the routers' losses: 4 micro-batches, loss scale 8."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    found = {}
    for name, context, per_token, experts in (
        ("plain", 1, False, 4),
        ("context", 2, False, 4),
        ("per token", 2, True, 4),
        ("dense", 2, False, None),
    ):
        config = SimpleNamespace(
            timers=None,
            enable_autocast=False,
            calculate_per_token_loss=per_token,
            num_moe_experts=experts,
            context_parallel_size=context,
            grad_scale_func=lambda one: 8 * one,
        )
        model = torch.nn.Linear(1, 1)
        model.config, model.set_input_tensor, model.model_type = config, lambda tensors: None, None  # type: ignore[assignment]
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(-1.0))

        def loss(output: Any) -> Any:
            return output.sum(), torch.tensor(1), {}

        step = lambda batches, model: (torch.ones(2), loss)  # noqa: E731
        schedules.forward_step(step, None, model, 4, None, [], config)
        found[name] = float(MoEAuxLossAutoScaler.main_loss_backward_scale)
    return found


def ours() -> dict[str, Any]:
    start()
    router = router_of(**BIASED)
    names, buffers = sorted(router.state_dict()), sorted(name for name, _ in router.named_buffers())
    router.eval()
    router(hidden())
    evaluated = int(router.local_tokens_per_expert.sum())
    router.train()
    with torch.no_grad():
        router(hidden())
    without_gradients = int(router.local_tokens_per_expert.sum())
    router(hidden())
    deepseek = {
        **BIASED,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": 2.5,
    }
    return {
        "kept": of_090(),
        "position": dropped_by_position(),
        "waits": waits(moe_aux_loss_coeff=0.1),
        "waits deepseek": waits(**deepseek),
        "waits capacity": waits(moe_expert_capacity_factor=1.0, **deepseek),
        "names": names,
        "buffers": buffers,
        "counted": [evaluated, without_gradients, int(router.local_tokens_per_expert.sum())],
        "casts": casts(),
        "in_fp32": in_fp32(),
        "scales": scales(),
        "one expert": one_expert(),
    }

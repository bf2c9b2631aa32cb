"""Results of Megatron's functions that share memory with their arguments or with earlier results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.patches.small_gpt import SEQUENCE, VOCABULARY, batch, distributed, start, train_step

NEEDED = ("device", "compat", "collectives")
"""Features that upstream's own code needs to run on the CPU."""

_VARIANTS: tuple[dict[str, Any], ...] = (
    {"gated_linear_unit": True, "add_bias_linear": False},
    {"activation_func": torch.nn.functional.gelu, "recompute_granularity": "full"},
    {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_router_topk": 2},
    {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 1.0},
    {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather", "moe_router_topk": 2},
)


def aliases(features: list[str] | None) -> dict[str, list[str]]:
    """Of each patched function that ran: ``argument -> part of the result`` where they share memory.

    The targets are those of the whole plan, whatever ``features`` are in force."""
    start(**({} if features is None else {"features": features}))
    import mt_megatron
    from mt_megatron.errors import PatchTargetError
    from mt_megatron.patches import collect
    from mt_megatron.patching.digest import source_of
    from mt_megatron.patching.engine import commit
    from mt_megatron.patching.plan import make_plan
    from mt_megatron.patching.spec import Patch

    seen: dict[str, set[str]] = {}
    watches = []
    for target in dict.fromkeys(patch.target for patch in collect(mt_megatron.backend())):
        if not target.startswith("megatron."):
            continue
        try:
            source = source_of(target)
        except PatchTargetError:
            continue  # an addition
        if source.definition.kind != "function" or "property" in source.definition.decorators:
            continue
        names = [each.name for each in source.definition.parameters or ()]
        body = _watch(seen, target, names)
        watches.append(
            Patch(id=target, target=target, kind="wrap", reason="a test", body=body, digest=source.digest)
        )
    watching = commit(make_plan(watches, backend="cpu", strict=False))
    try:
        for variant in _VARIANTS:
            _train(variant)
        _call_alone()
    finally:
        watching.revert()
    return {target: sorted(found) for target, found in sorted(seen.items())}


def _watch(seen: dict[str, set[str]], target: str, names: list[str]) -> Callable[..., Any]:
    earlier: dict[int, torch.Tensor] = {}  # alive, so that no memory is used twice

    def watch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found = seen.setdefault(target, set())
        given = dict(zip(names, args, strict=False)) | kwargs
        held = {name: {_memory(each) for _, each in _tensors(value)} for name, value in given.items()}
        held["an earlier result"] = {*earlier}
        for place, each in _tensors(result):
            found |= {f"{name} -> {place}" for name, memories in held.items() if _memory(each) in memories}
        earlier.update((_memory(each), each) for _, each in _tensors(result))
        return result

    return watch


def _tensors(value: Any, place: str = "result") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.numel() and value.device.type == "cpu":
            yield place, value
    elif isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
        yield from value.named_buffers()
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{place}[{index}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{place}[{key!r}]")


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _train(variant: dict[str, Any]) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    routed = "num_moe_experts" in variant
    extra: dict[str, Any] = {
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.01,
        "moe_input_jitter_eps": 0.1,
        "moe_router_pre_softmax": variant.get("moe_router_topk", 1) == 1,
        "moe_router_topk": 1,
        "add_bias_linear": False,
    }
    recomputed = {"recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        **{
            **(extra if routed else {}),
            **(recomputed if "recompute_granularity" in variant else {}),
            **variant,
        },
    )
    spec = get_gpt_layer_local_spec(**({"num_experts": config.num_moe_experts} if routed else {}))
    inner = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    model = distributed(config, inner)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])
    model.zero_grad_buffer()
    train_step(model, [batch()])
    optimizer.step()
    inner.sharded_state_dict()
    model.eval()
    given = batch()
    with torch.no_grad():
        model(given["tokens"], given["positions"], None, labels=given["labels"])


def _call_alone() -> None:
    """Cases of the functions for tokens that no layer on one rank comes to."""
    from megatron.core.transformer.moe import moe_utils

    rows, chosen = torch.randn(4, 8), torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1]])
    for indices, probs in ((chosen, torch.rand(4, 2)), (chosen[:, 0], None)):
        permuted, order = moe_utils.permute(rows, indices)
        moe_utils.unpermute(permuted, order, probs)
    slots = torch.tensor([[0, 1], [2, 3]])
    permuted, order = moe_utils.permute(rows, slots, padded_mode=True)
    moe_utils.unpermute(permuted, order, torch.rand(2, 2), padded_mode=True, restore_shape=rows.shape)
    for indexes in ([0, 1, 2], [2, 0, 1], [0]):
        sizes = torch.tensor([1, 1, 2]) if len(indexes) > 1 else torch.tensor([4])
        moe_utils.sort_chunks_by_idxs(rows, sizes, indexes)
    moe_utils.topk_softmax_with_capacity(torch.randn(4, 3), 2)

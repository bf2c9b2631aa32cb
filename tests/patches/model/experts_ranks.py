"""What the ranks of ``test_experts.py`` run: one MoE layer under many layouts, beside itself on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import mt_megatron

HIDDEN, FFN, MOE_FFN, EXPERTS, TOPK, SEQUENCE = 16, 40, 24, 4, 2, 6


def start() -> None:
    mt_megatron.patch("cpu")
    import megatron.core  # noqa: F401

    dist.init_process_group("gloo")


def initialise(tp: int = 1, ep: int = 1, **more: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, **more
    )
    tensor_parallel.model_parallel_cuda_manual_seed(3)


def config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    base: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": FFN,
        "moe_ffn_hidden_size": MOE_FFN,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_cpu_initialization": True,
        "moe_router_load_balancing_type": "none",
    }
    return TransformerConfig(**base | options)


def layer(grouped: bool, **options: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import _get_mlp_module_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = _get_mlp_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=grouped)
    built = build_module(spec, config=config(moe_grouped_gemm=grouped, **options))
    built.set_layer_number(1)
    return built


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def whole_weights(skew: str) -> dict[str, torch.Tensor]:
    """Every expert's matrices, and a router that spreads tokens or sends them to the first experts."""
    router = numbers(1, EXPERTS, HIDDEN)
    if skew == "first":
        router[TOPK:] = -1.0  # Tokens are positive: the last experts lose by far.
        router[:TOPK] = router[:TOPK].abs()
    w1 = torch.stack([numbers(10 + e, 2 * MOE_FFN, HIDDEN, scale=0.3) for e in range(EXPERTS)])
    w2 = torch.stack([numbers(50 + e, HIDDEN, MOE_FFN, scale=0.3) for e in range(EXPERTS)])
    return {"router": router, "w1": w1, "w2": w2}


def local_slices(whole: dict[str, torch.Tensor], experts: list[int], swap: bool) -> list[torch.Tensor]:
    """This rank's part of every expert's matrices: gate and up are divided apart. With ``moe_extended_tp``
    every rank has a part of every expert."""
    from megatron.core import parallel_state

    kind = "tensor_model_parallel"
    if len(experts) == EXPERTS:
        kind = "tensor_and_expert_parallel"
    tp = getattr(parallel_state, f"get_{kind}_world_size")()
    rank = getattr(parallel_state, f"get_{kind}_rank")()
    if swap:
        experts = [experts[-1], *experts[1:-1], experts[0]]
    halves = [half.chunk(tp, 1)[rank] for half in whole["w1"][experts].chunk(2, 1)]
    return [torch.cat(halves, 1), whole["w2"][experts].chunk(tp, 2)[rank]]


def put(built: Any, whole: dict[str, torch.Tensor], swap: bool = False) -> None:
    first, second = local_slices(whole, built.local_expert_indices, swap)
    with torch.no_grad():
        built.router.weight.copy_(whole["router"])
        if hasattr(built.experts, "weight1"):
            built.experts.weight1.copy_(first)
            built.experts.weight2.copy_(second)
            return
        for index, expert in enumerate(built.experts.local_experts):
            expert.linear_fc1.weight.copy_(first[index])
            expert.linear_fc2.weight.copy_(second[index])


def gradients(built: Any) -> list[torch.Tensor]:
    if hasattr(built.experts, "weight1"):
        return [built.experts.weight1.grad, built.experts.weight2.grad]
    each = built.experts.local_experts
    return [
        torch.stack([torch.zeros_like(e.linear_fc1.weight) if e.linear_fc1.weight.grad is None
                     else e.linear_fc1.weight.grad for e in each]),
        torch.stack([torch.zeros_like(e.linear_fc2.weight) if e.linear_fc2.weight.grad is None
                     else e.linear_fc2.weight.grad for e in each]),
    ]  # fmt: skip


def run(built: Any, hidden: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    output, bias = built(hidden)
    assert bias is None
    output.backward(grad)
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, built.router.weight.grad, *gradients(built)]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = expected.double().abs().max().clamp_min(1e-9) if expected.numel() else 1.0
    return float((found.double() - expected.double()).abs().max() / scale) if found.numel() else 0.0


def batches_of(case: dict[str, Any]) -> list[int]:
    """Samples of each data parallel rank."""
    ranks = dist.get_world_size() // case["tp"]
    return [1 + index if case.get("unequal") else 2 for index in range(ranks)]


def inputs(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's tokens, and the gradient of their output."""
    samples = sum(batches_of(case))
    hidden, grad = numbers(5, SEQUENCE, samples, HIDDEN), numbers(6, SEQUENCE, samples, HIDDEN)
    return hidden.abs() if case["skew"] == "first" else hidden, grad


def alone(case: dict[str, Any]) -> list[torch.Tensor]:
    """``SequentialMLP`` on one rank with all tokens."""
    built = layer(False, moe_token_dispatcher_type="alltoall")
    put(built, whole_weights(case["skew"]))
    return run(built, *inputs(case))


def compare(case: dict[str, Any], expected: list[torch.Tensor]) -> dict[str, float]:
    """One layout beside ``expected``: largest differences, relative to the largest number of each."""
    from megatron.core import parallel_state

    tp = case["tp"]
    built = layer(
        case["grouped"],
        moe_token_dispatcher_type=case["dispatcher"],
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=case["ep"],
        sequence_parallel=tp > 1,
        **case.get("options", {}),
    )
    swap = bool(case.get("swap"))
    put(built, whole_weights(case["skew"]), swap)
    batches = batches_of(case)
    copy = parallel_state.get_data_parallel_rank()
    part = parallel_state.get_tensor_model_parallel_rank()

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.split(batches, 1)[copy].chunk(tp, 0)[part].contiguous()

    found = run(built, *map(share, inputs(case)))
    # Router: every rank saw other tokens. Experts: every copy of them did.
    dist.all_reduce(found[2])
    for tensor in found[3:]:
        dist.all_reduce(tensor, group=parallel_state.get_data_modulo_expert_parallel_group())
    mine = local_slices({"w1": expected[3], "w2": expected[4]}, built.local_expert_indices, swap)
    wanted = [share(expected[0]), share(expected[1]), expected[2], *mine]
    names = ("output", "input", "router", "weight1", "weight2")
    return {name: difference(f, w) for name, f, w in zip(names, found, wanted, strict=True)}


def compare_all(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Each of ``cases``; those of one layout follow each other."""
    start()
    initialise()
    expected: dict[str, list[torch.Tensor]] = {}
    for case in cases:
        expected.setdefault(str((batches_of(case), case["skew"])), alone(case))
    results, current = [], (1, 1)
    for case in cases:
        if (case["tp"], case["ep"]) != current:
            current = case["tp"], case["ep"]
            initialise(*current)
        results.append(compare(case, expected[str((batches_of(case), case["skew"]))]))
    return results


def one_rank() -> dict[str, Any]:
    """Everything about grouped experts that needs no other rank."""
    start()
    return {
        "spec": disagreements(),
        "upstream_order": upstream_order(),
        "replaced": replaced_forward(),
        "accumulated": accumulated(),
    }


def disagreements() -> list[str]:
    from megatron.core.models.gpt.gpt_layer_specs import _get_mlp_module_spec
    from megatron.core.transformer.spec_utils import build_module

    initialise()
    said = []
    for wanted in (True, False):
        spec = _get_mlp_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=not wanted)
        try:
            build_module(spec, config=config(moe_grouped_gemm=wanted))
            said.append("built")
        except Exception as error:  # noqa: BLE001 (its kind is part of what is reported)
            said.append(f"{type(error).__name__}: {error}")
    return said


def upstream_order() -> dict[str, bool]:
    """A state dict as upstream's ``GroupedMLP`` writes it."""
    initialise()
    built = layer(True)
    whole = whole_weights("even")
    state = built.state_dict()
    state["experts.weight1"] = whole["w1"].transpose(1, 2).reshape(HIDDEN, -1)
    state["experts.weight2"] = whole["w2"].transpose(1, 2).reshape(-1, HIDDEN)
    built.load_state_dict(state)
    mine = torch.equal(built.experts.weight1, whole["w1"]) and torch.equal(built.experts.weight2, whole["w2"])
    built.load_state_dict(built.state_dict())
    again = torch.equal(built.experts.weight1, whole["w1"])
    torch.manual_seed(7)
    made = layer(True).experts
    torch.manual_seed(7)
    flat = torch.empty(HIDDEN, EXPERTS * 2 * MOE_FFN)
    config().init_method(flat)
    seeded = flat.view(EXPERTS, HIDDEN, 2 * MOE_FFN).transpose(1, 2)
    return {
        "loaded": mine,
        "own": again,
        "seeded": bool(torch.equal(made.weight1, seeded)),
        "attributes": made.weight1.partition_dim == 1 and made.weight2.partition_dim == 2
        and made.weight1.allreduce and made.weight1.tensor_model_parallel,
    }  # fmt: skip


def replaced_forward() -> str:
    initialise()
    built = layer(True)
    built.experts.forward = lambda rows, counts: (rows, None)
    try:
        built(numbers(1, SEQUENCE, 2, HIDDEN))
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "ran"


def accumulated() -> dict[str, float]:
    """Two micro-batches under DDP: ``main_grad`` with and without the fused accumulation."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    initialise()
    found = []
    for fused in (False, True):
        built = layer(True, gradient_accumulation_fusion=fused)
        put(built, whole_weights("even"))
        ddp = DistributedDataParallel(
            built.config, DistributedDataParallelConfig(overlap_grad_reduce=True), built
        )
        ddp.zero_grad_buffer()
        for number in range(2):
            last = number == 1
            context = ddp.no_sync() if not last else torch.enable_grad()
            with context:
                ddp(numbers(20 + number, SEQUENCE, 2, HIDDEN))[0].backward(numbers(30, SEQUENCE, 2, HIDDEN))
        ddp.finish_grad_sync()
        found.append([built.experts.weight1.main_grad.clone(), built.experts.weight2.main_grad.clone()])
    return {
        "difference": max(difference(a, b) for a, b in zip(*found, strict=True)),
        "size": float(found[1][0].abs().max()),
    }

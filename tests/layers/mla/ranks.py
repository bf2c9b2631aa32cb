"""The ranks' side of the tests of multi-latent attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.layers.mla.case import NAMES, SPLIT, Shape, build, random_shapes, reference, relative


def start(**sizes: int) -> None:
    """Megatron's groups, one layout after another in a process."""
    import mt_megatron

    mt_megatron.patch("cpu")
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(3)


def found_by(module: Any, shape: Shape, **call: Any) -> dict[str, Tensor]:
    """Output and gradients of this rank, and of shared parameters the sum that Megatron makes of them."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parallel = module.config.sequence_parallel
    hidden, probe = shape.input(), shape.probe()
    if parallel:
        hidden, probe = (t.chunk(group.size())[group.rank()] for t in (hidden, probe))
    hidden = hidden.clone().to(module.linear_proj.weight.dtype).requires_grad_()
    output, bias = module(hidden, None, **call)
    assert bias is None
    (output.float() * probe).sum().backward()
    assert hidden.grad is not None
    found = {"output": output.detach(), "input": hidden.grad}
    if parallel:
        for name in tuple(found):
            parts = [torch.empty_like(found[name]) for _ in range(group.size())]
            dist.all_gather(parts, found[name].contiguous(), group=group)
            found[name] = torch.cat(parts)
    for name, parameter in module.named_parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=group)
        found[name.removesuffix(".weight")] = parameter.grad
    return found


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    result = {}
    for name, value in found.items():
        whole = wanted[name]
        part = whole.chunk(size, SPLIT[name])[rank] if name in SPLIT else whole
        result[name] = relative(value, part) if part.abs().max() else float(value.abs().max())
    return result


def against_transformers(count: int, **more: Any) -> list[float]:
    """The largest relative error of each of ``count`` shapes, over output and every gradient."""
    worst = []
    for shape in random_shapes(count, seed=20):
        module = build(shape, **more)
        worst.append(max(errors(found_by(module, shape), reference(shape)).values()))
    return worst


def half_rotated(weight: Tensor, size: int) -> Tensor:
    """The last ``size`` rows with pairs 2 i, 2 i + 1 moved to i and i + size / 2."""
    rest, turned = weight[:-size], weight[-size:]
    return torch.cat((rest, turned[::2], turned[1::2]))


def without_mscale() -> float:
    shape = random_shapes(1, seed=20)[0]
    return relative(found_by(build(shape, mscale_all_dim=0.0), shape)["output"], reference(shape)["output"])


def with_half_rotated_weights() -> float:
    """What a conversion does that reorders DeepSeek's rows as Llama's are ordered."""
    shape = random_shapes(1, seed=20)[0]
    module = build(shape)
    down = module.linear_kv_down_proj.weight
    down.data = half_rotated(down.data, shape.rope)
    query = (module.linear_q_proj if shape.q_lora is None else module.linear_q_up_proj).weight
    heads = query.data.view(shape.heads, shape.nope + shape.rope, -1)
    query.data = torch.cat([half_rotated(head, shape.rope) for head in heads])
    return relative(found_by(module, shape)["output"], reference(shape)["output"])


def recomputation() -> dict[str, Any]:
    """Gradients with everything recomputed in every way, and which of q, k, v outlive the forward pass."""
    from torch.multiprocessing.reductions import StorageWeakRef

    results: dict[str, Any] = {}
    shape = next(s for s in random_shapes(9, seed=4) if s.q_lora and s.tokens > 60)
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "up": {"recompute_mla_up_proj": True},
        "selective": {"recompute_granularity": "selective"},
        "both": {"recompute_mla_up_proj": True, "recompute_granularity": "selective"},
    }
    plain: dict[str, Tensor] = {}
    for name, more in ways.items():
        module = build(shape, **more)
        seen: list[Any] = []
        module.core_attention.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.extend(StorageWeakRef(t.untyped_storage()) for t in args[:3])
        )
        output, _ = module(shape.input(), None)
        kept = [not ref.expired() for ref in seen[:3]]
        (output * shape.probe()).sum().backward()
        module.zero_grad()
        found = found_by(module, shape)
        plain = plain or found
        results[name] = {
            "kept": kept,
            "equal": all(torch.equal(found[key], plain[key]) for key in plain),
        }
    return results


def twice_backward() -> bool:
    """A graph that is kept gives the same gradients a second time, recomputed a second time."""
    shape = next(s for s in random_shapes(9, seed=4) if s.tokens > 60)
    module = build(shape, recompute_mla_up_proj=True)
    output, _ = module(shape.input(), None)
    first = torch.autograd.grad((output * shape.probe()).sum(), list(module.parameters()), retain_graph=True)
    second = torch.autograd.grad((output * shape.probe()).sum(), list(module.parameters()))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def copies_that_are_kept() -> list[str]:
    """What is logged where the core attention copies queries, keys and values: documents in two rows."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mt_megatron")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    shape = Shape(**{**vars(random_shapes(1, seed=8)[0]), "tokens": 80, "batch": 2})
    module = build(shape, recompute_mla_up_proj=True)
    module(shape.input(), None)
    before = len(said)
    module(shape.input(), torch.tensor([0, 30, 80, 160], dtype=torch.int32))
    logger.removeHandler(handler)
    return said[before:]


def frozen() -> dict[str, bool]:
    """A projection down to a latent that is not trained: no gradient of its own, all others as before."""
    shape = next(s for s in random_shapes(9, seed=4) if s.q_lora)
    wanted = found_by(build(shape), shape)
    module = build(shape)
    module.linear_kv_down_proj.weight.requires_grad_(False)
    found = found_by(module, shape)
    return {
        "no gradient": found.pop("linear_kv_down_proj") is None,
        "others": all(torch.equal(found[name], wanted[name]) for name in found),
    }


def documents() -> dict[str, float]:
    """Documents by borders, by Megatron's packed_seq_params and by a mask, against each alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mt_megatron.layers.attention.packed_sequences import document_mask, document_positions

    shape = Shape(**{**vars(random_shapes(1, seed=8)[0]), "tokens": 150, "batch": 1})
    module, hidden, lengths = build(shape), shape.input(), [70, 3, 77]
    borders = torch.tensor([0, 70, 73, 150], dtype=torch.int32)
    alone = torch.cat([module(part, None)[0] for part in hidden.split(lengths)])
    size = shape.rope
    # As GPTModel's rotary embedding gives them, for positions that begin anew with each document.
    halves = module._angles(hidden, None, None)
    angles = torch.cat((halves, halves), -1).unsqueeze(2)
    restarted = angles[:, 0, 0][document_positions(borders, 1).t()].unsqueeze(2)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    mask = document_mask(borders, 1, torch.device("cpu"))
    assert restarted.shape == (150, 1, 1, size)
    return {
        "borders": relative(module(hidden, borders, rotary_pos_emb=restarted)[0], alone),
        "packed": relative(module(hidden, None, packed_seq_params=packed)[0], alone),
        "packed, angles given": relative(
            module(hidden, None, rotary_pos_emb=angles, packed_seq_params=packed)[0], alone
        ),
        "mask": relative(module(hidden, mask, rotary_pos_emb=restarted)[0], alone),
        "not separated": relative(module(hidden, None)[0], alone),
    }


def low_precision() -> dict[str, float]:
    """bf16 parameters, and fp32 ones under autocast, against fp32: the largest relative error."""
    shape = next(s for s in random_shapes(9, seed=4) if s.q_lora and s.tokens > 60)
    wanted = found_by(build(shape), shape)
    module = build(shape, params_dtype=torch.bfloat16, bf16=True)
    found = found_by(module, shape)
    assert found["output"].dtype is torch.bfloat16
    result = {"bf16": max(errors(found, wanted).values())}
    for name, more in {"autocast": {}, "recomputed": {"recompute_mla_up_proj": True}}.items():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result[name] = max(errors(found_by(build(shape, **more), shape), wanted).values())
    return result


def refusals() -> dict[str, str]:
    """The messages of everything that MLA refuses."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from mt_megatron.errors import ConfigError
    from mt_megatron.layers.mla.self_attention import check_down_projection
    from mt_megatron.layers.mla.spec import ReplicatedLinear

    shape = random_shapes(1, seed=8)[0]
    module, hidden = build(shape), shape.input()

    def of_context_parallel() -> None:
        module.config.context_parallel_size = 2
        try:
            module(hidden, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
        finally:
            module.config.context_parallel_size = 1

    def model(config: Any, **more: Any) -> Any:
        spec = get_gpt_layer_local_spec(multi_latent_attention=True)
        return GPTModel(config, spec, 32, 16, position_embedding_type="rope", **more)

    def split_down_projection() -> None:
        linear = ColumnParallelLinear(
            shape.hidden, 8, config=shape.config(), init_method=torch.nn.init.zeros_, bias=False
        )
        check_down_projection(linear, 16)

    tries: dict[str, Callable[[], Any]] = {
        "groups": lambda: build(shape, num_query_groups=1),
        "rotary size": lambda: build(shape, qk_pos_emb_head_dim=3),
        "interleaved": lambda: build(shape, rotary_interleaved=True),
        "fusion": lambda: build(shape, apply_rope_fusion=True),
        "latent": lambda: build(shape, kv_lora_rank=0),
        "cache": lambda: module(hidden, None, inference_params=object()),
        "cross": lambda: module(hidden, None, key_value_states=hidden),
        "context": of_context_parallel,
        "angles": lambda: module(hidden, None, rotary_pos_emb=torch.zeros(200, 1, 1, shape.rope + 2)),
        "few angles": lambda: module(hidden, None, rotary_pos_emb=torch.zeros(2, 1, 1, shape.rope)),
        "percent": lambda: model(shape.config(), rotary_percent=0.5),
        "theta": lambda: model(shape.config(), rotary_base=77777),
        "spec alone": lambda: model(shape.config(multi_latent_attention=False)),
        "split": split_down_projection,
        "bias": lambda: ReplicatedLinear(
            4, 4, config=shape.config(), init_method=torch.nn.init.zeros_, bias=True
        ),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = ""
        except ConfigError as error:
            found[name] = str(error)
    return found


def alone(count: int) -> dict[str, Any]:
    """Everything that one process can show."""
    start()
    return {
        "errors": against_transformers(count),
        "without mscale": without_mscale(),
        "half rotated": with_half_rotated_weights(),
        "recomputation": recomputation(),
        "twice": twice_backward(),
        "copies": copies_that_are_kept(),
        "frozen": frozen(),
        "documents": documents(),
        "low precision": low_precision(),
        "refusals": refusals(),
    }


def many(count: int) -> list[float]:
    start()
    size = dist.get_world_size()
    start(tensor_model_parallel_size=size)
    return against_transformers(count, tensor_model_parallel_size=size, sequence_parallel=size > 1)


def pair(count: int, folder: str) -> dict[str, Any]:
    """Everything that two processes can show."""
    from tests.layers.mla.model_ranks import checkpoint, context_parallel, initialised, trained

    results: dict[str, Any] = {}
    start(tensor_model_parallel_size=2)
    tensor = {"tensor_model_parallel_size": 2}
    results["tp2"] = against_transformers(count, **tensor)
    results["tp2 sp"] = against_transformers(count, **tensor, sequence_parallel=True)
    results["tp2 sp recomputed"] = against_transformers(
        1, **tensor, sequence_parallel=True, recompute_mla_up_proj=True
    )
    results["trained"] = trained()
    results["initialised"] = initialised()
    results["checkpoint"] = checkpoint(folder)
    results["context"] = context_parallel()
    return results


assert set(SPLIT) <= set(NAMES)

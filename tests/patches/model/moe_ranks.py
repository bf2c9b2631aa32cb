"""What the ranks of the tests of experts' widths, shared experts and mixed layers run."""

from __future__ import annotations

import gc
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mt_megatron
from tests.patches.model import moe_case as case
from tests.patches.model.moe_case import BATCH, DENSE, EXPERTS, HIDDEN, SEQUENCE, TOPK


def start(tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Patch, and make process groups in place of earlier ones."""
    mt_megatron.patch(os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu"))
    gc.freeze()  # else every collection at the end of a run visits the modules
    from megatron.core import parallel_state, tensor_parallel

    from mt_megatron.parallel import rank_layout as layout

    if not dist.is_initialized():
        mt_megatron.backend().set_device(0)
        dist.init_process_group(mt_megatron.backend().collective)
    elif parallel_state.model_parallel_is_initialized():
        layout.destroy()
    layout.initialize(
        layout.RankLayout(world_size=dist.get_world_size(), tp=tp, pp=pp, ep=ep), mt_megatron.backend()
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def config(**overrides: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    tp = parallel_state.get_tensor_model_parallel_world_size()
    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": DENSE,
        "num_attention_heads": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**values, **overrides})


def layer_deviations(variants: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each variant the largest relative deviation of output and gradients from the loop's.

    A variant has ``tp``, ``ep``, ``width``, ``shared``, ``gated``, ``grouped`` and ``fields`` (of the
    configuration).
    """
    return [_deviations(**variant) for variant in variants]


def _deviations(
    *,
    tp: int = 1,
    ep: int = 1,
    width: int | None = None,
    shared: int | None = None,
    gated: bool = True,
    grouped: bool = False,
    fields: dict[str, Any] | None = None,
    spoiled: str | None = None,
) -> dict[str, float]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    start(tp=tp, ep=ep)
    asked = {
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "gated_linear_unit": gated,
        "moe_grouped_gemm": grouped,
        **(fields or {}),
    }
    if spoiled is not None:
        asked[spoiled] = None
    made = config(**asked)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=grouped).submodules.mlp
    device = mt_megatron.backend().device(mt_megatron.backend().current_device())
    layer = build_module(spec, config=made).to(device).train()
    whole = case.weights(width=width or DENSE, shared=shared, gated=gated)
    views = _views(layer, made)
    for name, view in views.items():
        view.data.copy_(_part(whole.named()[name], name, gated, tp))
    # Every data-parallel rank has sequences of its own, every tensor-parallel rank its part of them.
    tokens = case.seeded("tokens", SEQUENCE, BATCH, HIDDEN)
    slopes = case.seeded("slopes", SEQUENCE, BATCH, HIDDEN)
    mine = partial(
        _mine,
        data=(parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
        tensor=(parallel_state.get_tensor_model_parallel_rank(), tp),
    )
    hidden = mine(tokens).float().to(device).requires_grad_()
    output, _ = layer(hidden)
    (output * mine(slopes).float().to(device)).sum().backward()
    expected_input = tokens.clone().requires_grad_()
    expected = case.token_by_token(expected_input.reshape(-1, HIDDEN), whole, gated).view_as(tokens)
    (expected * slopes).sum().backward()
    found = {
        "output": _relative(output, mine(expected)),
        "input": _relative(hidden.grad, mine(expected_input.grad)),
    }
    for name, view in views.items():
        gradient = view.grad_of().clone()
        if name == "router":
            dist.all_reduce(gradient)
        elif name.startswith("shared"):
            dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
        else:
            dist.all_reduce(gradient, group=parallel_state.get_data_modulo_expert_parallel_group())
        wanted = _part(whole.named()[name].grad, name, gated, tp)
        kind = name if name == "router" else name.partition(".")[0] + name[-1]
        found[kind] = max(found.get(kind, 0.0), _relative(gradient, wanted))
    return found


class _View:
    """A matrix of one expert within a parameter."""

    def __init__(self, parameter: torch.nn.Parameter, index: int | None = None) -> None:
        self._parameter, self._index = parameter, index

    @property
    def data(self) -> Tensor:
        return self._parameter.data if self._index is None else self._parameter.data[self._index]

    def grad_of(self) -> Tensor:
        gradient = self._parameter.grad
        assert gradient is not None
        return gradient if self._index is None else gradient[self._index]


def _views(layer: Any, made: Any) -> dict[str, _View]:
    found = {"router": _View(layer.router.weight)}
    for local, index in enumerate(layer.local_expert_indices):
        names = (f"experts.{index}.linear_fc1", f"experts.{index}.linear_fc2")
        if made.moe_grouped_gemm:
            found |= {
                names[0]: _View(layer.experts.weight1, local),
                names[1]: _View(layer.experts.weight2, local),
            }
        else:
            expert = layer.experts.local_experts[local]
            found |= {names[0]: _View(expert.linear_fc1.weight), names[1]: _View(expert.linear_fc2.weight)}
    shared = getattr(layer, "shared_experts", None)
    if shared is not None:
        found["shared_experts.linear_fc1"] = _View(shared.linear_fc1.weight)
        found["shared_experts.linear_fc2"] = _View(shared.linear_fc2.weight)
    return found


def _part(full: Tensor, name: str, gated: bool, tp: int) -> Tensor:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    if name == "router" or tp == 1:
        return full.detach().float()
    if name.endswith("fc2"):
        return full.detach().chunk(tp, 1)[rank].float()
    halves = full.detach().chunk(2 if gated else 1)
    return torch.cat([half.chunk(tp)[rank] for half in halves]).float()


def _mine(full: Tensor, data: tuple[int, int], tensor: tuple[int, int]) -> Tensor:
    return full.detach().chunk(data[1], 1)[data[0]].chunk(tensor[1], 0)[tensor[0]].contiguous()


def _relative(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None and found.shape == expected.shape, (found, expected.shape)
    return float((found.cpu().double() - expected.double()).abs().max() / expected.double().abs().max())


def gpt(made: Any, **options: Any) -> Any:
    """A GPT of this stage as an unmodified script builds it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=made.num_moe_experts, moe_grouped_gemm=made.moe_grouped_gemm)
    return GPTModel(
        made,
        spec,
        vocab_size=32,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **options,
    )


def mixed_layers(pp: int, layer_freq: list[int], folder: str) -> dict[str, Any]:
    """Which layers of this stage have experts, and whether a checkpoint of them comes back."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.moe.moe_layer import MoELayer

    start(pp=pp)
    made = config(num_layers=len(layer_freq), moe_layer_freq=layer_freq, moe_ffn_hidden_size=12)
    model = gpt(made)
    kinds = {layer.layer_number - 1: isinstance(layer.mlp, MoELayer) for layer in model.decoder.layers}
    block = gpt_layer_specs.get_gpt_decoder_block_spec(made, use_transformer_engine=False)  # type: ignore[attr-defined]
    saved = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    dist_checkpointing.save(model.sharded_state_dict(), folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load(model.sharded_state_dict(), folder)
    model.load_state_dict(loaded)
    back = all(torch.equal(model.state_dict()[name], value) for name, value in saved.items())
    return {
        "kinds": kinds,
        "block": [spec.submodules.mlp.module is MoELayer for spec in block.layer_specs],
        "back": back and len(saved) > 5,
        "keys": sorted(
            {str(value.key) for value in model.sharded_state_dict().values() if "_extra" not in value.key}
        ),
    }


def unset_fields() -> dict[str, Any]:
    """Without and with the patches of the fields: what the same seed and configuration build and compute,
    a dense model and one with experts."""
    models: dict[str, list[dict[str, Any]]] = {"dense": [], "experts": []}
    before = ["device", "collectives", "compat", "optimizer", "norm", "attention", "linear", "loss", "events"]
    for features in (before, None):
        mt_megatron.patch("cpu", features=features)
        gc.freeze()  # else every collection at the end of a run visits the modules
        from megatron.core import tensor_parallel

        from mt_megatron.parallel import rank_layout as layout

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        layout.initialize(layout.RankLayout(world_size=1), mt_megatron.backend())
        balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
        for name, overrides in (("dense", {"num_moe_experts": None}), ("experts", balanced)):
            torch.manual_seed(1)
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            models[name].append(_one_pass(gpt(config(**overrides))))
        layout.destroy()
        mt_megatron.unpatch()
    return {name: _unlike(*pair) for name, pair in models.items()}


def _one_pass(model: Any) -> dict[str, Any]:
    tokens = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    loss = model(tokens, tokens, None, labels=tokens).sum()
    loss.backward()
    return {
        "loss": loss.detach(),
        "weights": {name: one.detach() for name, one in model.named_parameters()},
        "gradients": {name: one.grad for name, one in model.named_parameters() if one.grad is not None},
        "keys": sorted(str(one.key) for one in model.sharded_state_dict().values()),
    }


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Whether names and weights are equal, and how far loss and gradients are apart."""
    same = list(one["weights"]) == list(other["weights"]) and one["keys"] == other["keys"]
    same = same and all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    assert one["gradients"].keys() == other["gradients"].keys()
    return {
        "same": same,
        "loss": _relative(other["loss"], one["loss"]),
        "gradients": max(_relative(other["gradients"][name], g) for name, g in one["gradients"].items()),
    }


def expert_without_experts() -> str:
    """A dense spec for a configuration that places experts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mt_megatron.errors import ConfigError

    start()
    try:
        GPTModel(config(moe_layer_freq=[0, 1, 1]), get_gpt_layer_local_spec(), 32, SEQUENCE)
    except ConfigError as error:
        return str(error)
    return "accepted"


def of_a_stub(grouped: bool) -> dict[str, Any]:
    """Which linears a dense and an expert layer build from a stub of Transformer Engine's, and how large."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from mt_megatron.layers.block_spec import layer_specs
    from tests.patches import te_stub

    start()
    made = config(
        moe_layer_freq=[0, 1, 1],
        moe_ffn_hidden_size=12,
        moe_shared_expert_intermediate_size=20,
        moe_grouped_gemm=grouped,
        gated_linear_unit=True,
    )
    found: dict[str, Any] = {}
    for name, spec in zip(
        ("dense", "experts"), layer_specs(te_stub.layer_spec(grouped=grouped), made), strict=False
    ):
        te_stub.built.clear()
        build_module(spec.submodules.mlp, config=made)
        found[name] = [[kind, list(sizes)] for kind, sizes in te_stub.built]
        norm = spec.submodules.pre_mlp_layernorm
        found[f"{name}_norm"] = "inside" if norm is IdentityOp else norm.__name__
        assert spec.module is TransformerLayer
    return found


def overlap_on_streams() -> dict[str, Any]:
    """Deviations of a layer whose shared expert has a stream, and what the allocator was told of it."""
    told: list[list[Any]] = []
    # The emulator's streams are no torch.Stream, which is all that torch takes here.
    torch.Tensor.record_stream = lambda tensor, stream: told.append([list(tensor.shape), stream])  # type: ignore[assignment, method-assign]
    start()
    from mt_megatron.layers.moe.shared_experts import _side_stream

    found = _deviations(width=12, shared=20, fields={"moe_shared_expert_overlap": True})
    side = _side_stream(mt_megatron.backend().device_type)
    return {
        "deviations": found,
        "told": [[shape, "side" if stream is side else "main"] for shape, stream in told],
        "streams": side is not None,
    }


def alone(variants: list[dict[str, Any]], left_out: str, pattern: list[int], folder: str) -> dict[str, Any]:
    """Everything that needs one rank, in one process."""
    return {
        "deviations": layer_deviations(variants),
        "spoiled": _deviations(spoiled=left_out, width=12, shared=20),
        "dense_spec": expert_without_experts(),
        "stub": {str(grouped): of_a_stub(grouped) for grouped in (True, False)},
        "mixed": mixed_layers(1, pattern, folder),
        "unset": _in_new_groups(unset_fields),
    }


def _in_new_groups(function: Any) -> Any:
    from mt_megatron.parallel import rank_layout as layout

    layout.destroy()
    mt_megatron.unpatch()
    return function()

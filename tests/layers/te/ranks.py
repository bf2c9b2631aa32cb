"""What the ranks of ``test_specs.py`` run: one step of a GPT from each of the two layer specs, compared."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from tests.patches import small_gpt
from tests.patches.small_gpt import SEQUENCE, VOCABULARY

MICROBATCHES = 2
FUSED = {"self_attention.linear_qkv.layer_norm_": "input_layernorm."}


def start(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> None:
    """Patch, and make process groups in place of earlier ones."""
    mt_megatron.patch(os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu"))
    gc.freeze()  # else every collection at the end of a run visits the modules
    from megatron.core import parallel_state

    from mt_megatron.parallel import rank_layout as layout

    if not dist.is_initialized():
        mt_megatron.backend().set_device(0)
        dist.init_process_group(mt_megatron.backend().collective)
    elif parallel_state.model_parallel_is_initialized():
        layout.destroy()
    asked = layout.RankLayout(world_size=dist.get_world_size(), tp=tp, pp=pp, cp=cp, ep=ep)
    layout.initialize(asked, mt_megatron.backend())


def seed(number: int) -> None:
    from megatron.core import tensor_parallel

    torch.manual_seed(number)
    tensor_parallel.model_parallel_cuda_manual_seed(number)


def config(**overrides: Any) -> Any:
    from megatron.core import parallel_state

    values = {
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "use_cpu_initialization": False,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }
    return small_gpt.transformer_config(**{**values, **overrides})


def build(made: Any, engine: bool, *, number: int = 5) -> Any:
    """A GPT of Megatron-Core's spec for Transformer Engine, or of the local one, drawn from ``number``."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if engine
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    seed(number)
    model = GPTModel(
        made,
        spec(
            num_experts=made.num_moe_experts,
            moe_grouped_gemm=made.moe_grouped_gemm,
            qk_layernorm=made.qk_layernorm,
        ),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    return model.to(mt_megatron.backend().device(mt_megatron.backend().current_device()))


def named(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by the local layers' names."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        found[name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")] = parameter
    return found


def step(made: Any, model: Any, *, masks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of one step, with dropout's masks of the seed ``masks``."""
    from megatron.core import parallel_state

    from mt_megatron.parallel.context_parallel import positions

    wrapped = small_gpt.distributed(made, model)
    seed(masks)
    rank = parallel_state.get_data_parallel_rank()
    held, chunks = parallel_state.get_context_parallel_rank(), made.context_parallel_size
    batches = []
    for number in range(MICROBATCHES):
        whole = small_gpt.batch(seed=100 * rank + number)
        mine = positions(held, chunks, SEQUENCE // chunks) if chunks > 1 else torch.arange(SEQUENCE)
        batches.append(
            {name: value[:, mine].to(next(model.parameters()).device) for name, value in whole.items()}
        )
    losses = small_gpt.train_step(wrapped, batches)
    return losses, {name: each.main_grad.clone() for name, each in named(model).items()}


def compared(layout: dict[str, int], fields: dict[str, Any], spoiled: bool = False) -> dict[str, Any]:
    """How far losses, weights and gradients of the two models are apart; gradients relative to the largest
    of each parameter. ``spoiled``: the second model's masks are of another seed."""
    start(**layout)
    fields = {**fields, "sequence_parallel": bool(fields.get("sequence_parallel", False))}
    found = []
    for engine in (True, False):
        made = config(**fields)
        model = build(made, engine)
        weights = {name: parameter.detach().clone() for name, parameter in named(model).items()}
        found.append(
            (
                weights,
                *step(made, model, masks=10 if spoiled and engine else 9),
                type(model.decoder.layers[0].self_attention.linear_qkv),
            )
        )
    fp8 = sum(getattr(each, "gemm_recipe", None) is not None for each in model.parameters())
    (weights, losses, grads, kind), (theirs, their_losses, their_grads, _) = found
    return {
        "class": kind.__name__,
        "names": sorted(weights.keys() ^ theirs.keys()),
        "in fp8": fp8,
        "weights": max(float((weights[name] - theirs[name]).abs().max()) for name in weights),
        "losses": max([abs(a - b) for a, b in zip(losses, their_losses, strict=True)], default=0.0),
        "gradients": max(
            float(
                (grads[name] - their_grads[name]).abs().max() / their_grads[name].abs().max().clamp(min=1e-30)
            )
            for name in grads
        ),
        "largest": max(float(each.abs().max()) for each in grads.values()),
    }


def all_compared(cases: dict[str, Any]) -> dict[str, Any]:
    return {name: compared(*case) for name, case in cases.items()}


def exchanged(folder: str, layout: dict[str, int], fields: dict[str, Any]) -> dict[str, Any]:
    """Save from each spec, load into the other: the weights that differ, by the local layers' names."""
    from megatron.core import dist_checkpointing

    start(**layout)
    found: dict[str, Any] = {}
    for engine in (True, False):
        path = Path(folder) / f"engine_{engine}"
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        source = build(config(**fields), engine, number=5)
        dist_checkpointing.save(source.sharded_state_dict(), str(path))
        other = build(config(**fields), not engine, number=6)
        before = {name: each.detach().clone() for name, each in _values(other).items()}
        other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(), str(path)))
        saved, loaded = _values(source), _values(other)
        found[f"from the {'engine' if engine else 'local'} spec"] = {
            "names": sorted(saved.keys() ^ loaded.keys()),
            "differ": [name for name in saved if not torch.equal(saved[name], loaded[name])],
            "drawn": sum(not torch.equal(before[name], loaded[name]) for name in loaded),
        }
    return found


def experts(folder: str, layout: dict[str, int], fields: dict[str, Any]) -> dict[str, Any]:
    """Grouped linears beside the local spec's experts with the same weights, which come by a checkpoint of
    either spec: how far gradients are apart, relative to the largest of each parameter."""
    from megatron.core import dist_checkpointing

    start(**layout)
    models, kinds = {}, {"grouped linears": (True, True), "one after another": (False, False)}
    if not fields.get("add_bias_linear"):
        kinds["grouped"] = (False, True)
    grads: dict[str, dict[str, torch.Tensor]] = {}
    losses = {}
    for number, (kind, (engine, grouped)) in enumerate(kinds.items()):
        made = config(**fields, moe_grouped_gemm=grouped)
        model = models[kind] = build(made, engine, number=number)
        path = Path(folder) / "of grouped linears"
        if number == 0:
            if dist.get_rank() == 0:
                path.mkdir()
            dist.barrier()
            dist_checkpointing.save(model.sharded_state_dict(), str(path))
        else:
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(path)))
        losses[kind], _ = step(made, model, masks=9)
        grads[kind] = {name: each.clone() for name, each in _values(model, "main_grad").items()}
    back = Path(folder) / "of others"
    if dist.get_rank() == 0:
        back.mkdir()
    dist.barrier()
    dist_checkpointing.save(models["one after another"].sharded_state_dict(), str(back))
    again = build(config(**fields, moe_grouped_gemm=True), True, number=7)
    again.load_state_dict(dist_checkpointing.load(again.sharded_state_dict(), str(back)))
    first, last = _values(models["grouped linears"]), _values(again)
    theirs = grads.pop("one after another")
    return {
        "names": sorted({name for each in grads.values() for name in each.keys() ^ theirs.keys()}),
        "came back": all(torch.equal(first[name], last[name]) for name in first),
        "losses": {
            kind: max([abs(a - b) for a, b in zip(each, losses["grouped linears"], strict=True)], default=0.0)
            for kind, each in losses.items()
        },
        "gradients": {
            kind: max(
                float((each[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-30))
                for name in theirs
            )
            for kind, each in grads.items()
        },
        "largest": max(float(each.abs().max()) for each in theirs.values()),
    }


def _values(model: Any, attribute: str = "data") -> dict[str, torch.Tensor]:
    """``attribute`` of weights by name, each expert's on its own whatever holds it."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in named(model).items():
        each = getattr(parameter, attribute)
        layer, _, last = name.rpartition(".experts.")
        if last in ("weight1", "weight2"):
            for number, expert in enumerate(each.view(parameter.shape)):
                found[f"{layer}.experts.linear_fc{last[-1]}.weight{number}"] = expert
        elif match := re.search(r"\.local_experts\.(\d+)(\.linear_fc\d\.\w+)$", name):
            found[f"{layer}.experts{match[2]}{match[1]}"] = each
        else:
            found[name] = each
    return found

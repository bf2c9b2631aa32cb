"""What the ranks of ``test_mtp.py`` run; each function returns JSON-able results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.layers import mtp_model, mtp_oracle
from tests.patches import small_gpt
from tests.patches.small_gpt import BATCH, SEQUENCE

MICROBATCHES = 4

SHAPE = mtp_oracle.Shape(
    layers=mtp_model.LAYERS, heads=4, groups=2, depths=mtp_model.DEPTHS, factor=mtp_model.FACTOR
)


def _documents(kind: str) -> torch.Tensor:
    number = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    if kind != "one":
        number[0, 3:], number[0, 4:], number[1, 6:] = 1, 2, 1
    return number


def _example(kind: str, masked: bool) -> mtp_oracle.Example:
    data = mtp_model.batches(1, masked=masked)[0]
    return mtp_oracle.Example(
        tokens=data["tokens"],
        labels=data["labels"],
        mask=data["mask"],
        documents=_documents(kind),
        apart=kind in ("mask", "borders"),
    )


def _told(kind: str, example: mtp_oracle.Example) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions and what stands in the mask's place, as a loader gives them."""
    from mt_megatron.layers import packed

    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    flat = example.documents + 100 * torch.arange(BATCH)[:, None]
    lengths = torch.unique_consecutive(flat.flatten(), return_counts=True)[1]
    borders = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    if kind == "positions":
        return packed.document_positions(borders, BATCH), None
    if kind == "mask":
        return positions, packed.document_mask(borders, BATCH, torch.device("cpu"))
    return positions, borders if kind == "borders" else None


def _compared(model: Any, expected: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, relative to its norm."""
    mtp_oracle.total(expected, SHAPE).backward()
    names = {"embedding": "embedding.word_embeddings.weight", "output": "output_layer.weight"}
    parameters = mtp_model.whole_names([model])
    errors = []
    for name, weight in weights.items():
        assert weight.grad is not None
        if name == "output" and model.share_embeddings_and_output_weights:
            continue
        found = parameters[names.get(name, name)].grad.double()
        errors.append(float((found - weight.grad).norm() / weight.grad.norm()))
    return max(errors)


def beside_the_oracle() -> dict[str, Any]:
    """Losses and gradients of one process for each way to say what counts, and the oracle's."""
    small_gpt.start()
    found: dict[str, Any] = {}
    for kind in ("one", "positions", "mask", "borders"):
        for tied in (False, True):
            for masked in (True, False) if kind == "one" else (True,):
                found[f"{kind}, {'tied' if tied else 'untied'}, {'masked' if masked else 'all'}"] = _beside(
                    kind, tied, masked
                )
    found["labels in place of tokens"] = _beside("one", False, True, tokens=False)
    found["no mask given"] = _beside("one", False, True, mask_given=False)
    found["negative: mask not shifted"] = _beside("one", False, True, shift_mask=False)
    return found


def _beside(
    kind: str,
    tied: bool,
    masked: bool,
    *,
    tokens: bool = True,
    mask_given: bool = True,
    shift_mask: bool = True,
) -> dict[str, Any]:
    (model,) = mtp_model.build(mtp_model.config(), tied=tied)
    mtp_model.set_weights([model])
    example = _example(kind, masked)
    positions, mask = _told(kind, example)
    if not tokens:
        # As in Megatron-LM's batches on the last stage; one stage needs its tokens for itself.
        positions, embedded = positions, model.embedding(example.tokens, positions)
        losses = model(
            None, None, None, decoder_input=embedded, labels=example.labels, loss_mask=example.mask
        )
    else:
        given = {"loss_mask": example.mask} if mask_given else {}
        losses = model(example.tokens, positions, mask, labels=example.labels, **given)
    main = (losses * example.mask).sum() / example.mask.sum()
    main.backward()
    sums = model.mtp.take_reported()
    weights = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in mtp_model.whole_names([model]).items()
    }
    weights["embedding"] = weights.pop("embedding.word_embeddings.weight")
    weights["output"] = weights["embedding"] if tied else weights.pop("output_layer.weight")
    expected = mtp_oracle.losses(weights, SHAPE, example, shift_mask=shift_mask)
    reported = [float(main.detach()), *(sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()]
    return {
        "reported": reported,
        "expected": [float(each.detach()) for each in expected],
        "counted": sums[:, 1].tolist(),
        "gradients": _compared(model, expected, weights),
    }


def _step(per_token: bool) -> Any:
    from megatron.core.utils import get_model_config

    def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        data = next(iterator)
        given = {"loss_mask": data["mask"]} if get_model_config(model).mtp_num_layers else {}
        losses = model(data["tokens"], data["positions"], None, labels=data["labels"], **given)

        def loss(losses: torch.Tensor) -> Any:
            total, count = (losses * data["mask"]).sum(), data["mask"].sum()
            report = {"loss": float(total.detach()), "tokens": float(count)}
            return (total, count.int(), report) if per_token else (total / count, report)

        return losses, loss

    return forward_step


def _train(chunks: list[Any], transformer: Any, data: list[Any]) -> list[dict[str, float]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from mt_megatron.seams.schedule import run_schedule

    options = DistributedDataParallelConfig()
    wrapped = [DistributedDataParallel(transformer, options, chunk) for chunk in chunks]
    transformer.finalize_model_grads_func = finalize_model_grads
    reports: list[dict[str, float]] = run_schedule(
        _step(transformer.calculate_per_token_loss),
        wrapped,
        [iter(data) for _ in wrapped],
        num_microbatches=len(data),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return reports


def _depths(chunks: list[Any]) -> list[float] | None:
    blocks = [chunk.mtp for chunk in chunks if getattr(chunk, "mtp", None) is not None]
    return blocks[0].take_reported().flatten().tolist() if blocks else None


MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "per token": {"calculate_per_token_loss": True},
    "biased": {"add_bias_linear": True, "bias_activation_fusion": False, "normalization": "LayerNorm"},
    "five layers": {"num_layers": 5},
    "latent experts": {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    },
}
"""Overrides of the configuration; ``tied`` is an argument of the model."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 uneven": {"pp": 2, "pipeline_model_parallel_layout": [3, 1]},
    "pp2 empty last": {"pp": 2, "pipeline_model_parallel_layout": "Et*4|mmL"},
    "vpp2": {"pp": 2, "virtual_pipeline_model_parallel_size": 2},
    "vpp2 uneven": {
        "pp": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": [2, 1, 1, 0],
    },
    "vpp2 of five": {
        "pp": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Ett|t|t|tmmL",
    },
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
}
"""Sizes, and more overrides of the configuration."""

RECOMPUTE = {
    "uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}


def reference(folder: str) -> dict[str, Any]:
    """Gradients of every model of ``MODELS`` in one process, written to ``folder``."""
    small_gpt.start()
    found = {}
    for name, model in MODELS.items():
        options = dict(model)
        tied = options.pop("tied", False)
        transformer = mtp_model.config(**options)
        chunks = mtp_model.build(transformer, tied=tied)
        mtp_model.set_weights(chunks)
        reports = _train(chunks, transformer, mtp_model.batches(MICROBATCHES))
        gradients = {
            each: parameter.main_grad.double().clone()
            for each, parameter in mtp_model.whole_names(chunks).items()
        }
        torch.save(gradients, Path(folder) / f"{name}.pt")
        found[name] = {"depths": _depths(chunks), "reports": reports}
    return found


def compare(folder: str, cases: list[list[str]]) -> dict[str, Any]:
    """For each case (a model, a layout, then recomputations, ``fused`` or ``not summed``) the largest error
    of this rank's gradients against the reference's, relative to their norm, with what was reported."""
    found = {}
    for model, layout, *how in cases:
        found[", ".join((model, layout, *how))] = _case(folder, model, layout, how)
    return found


def _case(folder: str, model: str, layout: str, how: list[str]) -> dict[str, Any]:
    import torch.distributed as dist

    options = {**MODELS[model], **LAYOUTS[layout]}
    tied = options.pop("tied", False)
    tp, pp = options.pop("tp", 1), options.pop("pp", 1)
    for each in how:
        options.update(RECOMPUTE.get(each, {}))
    options["cross_entropy_loss_fusion"] = "fused" in how
    options["gradient_accumulation_fusion"] = "fused" in how
    chunks_per_stage = options.get("virtual_pipeline_model_parallel_size")
    if chunks_per_stage:
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    _start(tp, pp, chunks_per_stage)
    transformer = mtp_model.config(**options)
    chunks = mtp_model.build(transformer, tied=tied)
    equal = _copies_are_equal(chunks)
    mtp_model.set_weights(chunks)
    data = mtp_model.batches(MICROBATCHES)
    if tp * pp == 1:
        rank, share = dist.get_rank(), MICROBATCHES // dist.get_world_size()
        data = data[rank * share : (rank + 1) * share]
    with _not_summed() if "not summed" in how else nullcontext():
        reports = _train(chunks, transformer, data)
    expected = torch.load(Path(folder) / f"{model}.pt")
    errors = {}
    for name, parameter in mtp_model.whole_names(chunks).items():
        whole = small_gpt.gather(name, parameter.main_grad.double())
        errors[name] = float((whole - expected[name]).norm() / expected[name].norm().clamp(min=1e-12))
    worst = max(errors, key=errors.__getitem__)
    return {
        "error": errors[worst],
        "worst": worst,
        "parameters": len(errors),
        "depths": _depths(chunks),
        "reports": reports,
        "copies": equal,
    }


def _start(tp: int, pp: int, chunks: int | None) -> None:
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.seams import layout

    mt_megatron.patch("cpu")
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    elif parallel_state.model_parallel_is_initialized():
        layout.destroy()
    sizes = layout.RankLayout(world_size=dist.get_world_size(), tp=tp, pp=pp, vpp=chunks)
    layout.initialize(sizes, mt_megatron.backend())
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _copies_are_equal(chunks: list[Any]) -> bool | None:
    """Whether the last stage's embedding is the first one's before anything is trained; None without."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    weights = [chunk.embedding.word_embeddings.weight for chunk in chunks if hasattr(chunk, "embedding")]
    assert len(weights) == 1
    every = [torch.empty_like(weights[0]) for _ in range(2)]
    dist.all_gather(every, weights[0].detach(), group=parallel_state.get_embedding_group())
    return bool(torch.equal(every[0], every[1])) and float(every[0].std()) > 0


@contextmanager
def _not_summed() -> Iterator[None]:
    from mt_megatron.layers import mtp_model as under_test

    with mock.patch.object(under_test, "sum_embedding_gradients", lambda *ignored: None):
        yield


def digests(without: bool) -> dict[str, Any]:
    """What a model without depths is made of and computes; ``without`` leaves out this concern's patches."""
    import hashlib

    import mt_megatron
    from mt_megatron.backends import registry
    from mt_megatron.patches import collect

    features = {patch.feature for patch in collect(registry.get("cpu"))}
    small_gpt.start(features=sorted(features - {"mtp"} if without else features))
    transformer = mtp_model.config(mtp_num_layers=None)
    chunks = mtp_model.build(transformer)
    made = hashlib.sha256()
    for name, parameter in chunks[0].named_parameters():
        made.update(name.encode() + parameter.detach().numpy().tobytes())
    state = torch.get_rng_state().numpy().tobytes()
    reports = _train(chunks, transformer, mtp_model.batches(MICROBATCHES))
    learnt = hashlib.sha256()
    for name, parameter in chunks[0].named_parameters():
        learnt.update(name.encode() + parameter.main_grad.numpy().tobytes())
    return {
        "names": [name for name, _ in chunks[0].named_parameters()],
        "keys": sorted(chunks[0].sharded_state_dict()),
        "made": made.hexdigest(),
        "random": hashlib.sha256(state).hexdigest(),
        "losses": [report["loss"].hex() for report in reports],
        "learnt": learnt.hexdigest(),
        "patched": any(row.id.startswith("mtp.") for row in mt_megatron.report().applied),
    }


def by_later_names() -> dict[str, Any]:
    """``get_gpt_mtp_block_spec`` and ``mtp_block_spec``, with their errors."""
    from mt_megatron.errors import ConfigError

    small_gpt.start()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    data = mtp_model.batches(1)[0]

    def losses(depths: int, **given: Any) -> list[float]:
        transformer = mtp_model.config(mtp_num_layers=depths)
        model = GPTModel(
            transformer, layer, small_gpt.VOCABULARY, SEQUENCE, position_embedding_type="rope", **given
        )
        mtp_model.set_weights([model])
        model(data["tokens"], data["positions"], None, labels=data["labels"]).sum().backward()
        found: list[float] = model.mtp.take_reported().flatten().tolist()
        return found

    def error(make: Any) -> str:
        try:
            make()
        except ConfigError as found:
            return str(found)
        return "no error"

    two = gpt_layer_specs.get_gpt_mtp_block_spec(mtp_model.config(), layer, use_transformer_engine=False)
    with mock.patch.object(parallel_state, "is_pipeline_last_stage", lambda: False):
        elsewhere = gpt_layer_specs.get_gpt_mtp_block_spec(mtp_model.config(), layer, False)
    empty = TransformerBlockSubmodules(layer_specs=[], layer_norm=gpt_layer_specs.LNImpl)
    return {
        "equal": losses(2, mtp_block_spec=two) == losses(2),
        "none_elsewhere": elsewhere is None,
        "empty": error(lambda: gpt_layer_specs.get_gpt_mtp_block_spec(mtp_model.config(), empty, False)),
        "depths": error(lambda: losses(1, mtp_block_spec=two)),
    }


def over_microbatches() -> dict[str, float]:
    """Errors of a whole step's gradients: micro-batches weigh the same, or what they count weighs the same."""
    small_gpt.start()
    found = {}
    for name in ("untied", "per token"):
        transformer = mtp_model.config(**MODELS[name])
        (model,) = mtp_model.build(transformer)
        mtp_model.set_weights([model])
        data = mtp_model.batches(MICROBATCHES)
        counts = torch.stack([each["mask"].sum() for each in data]).double()
        shares = counts / counts.sum() if name == "per token" else torch.ones(len(data)) / len(data)
        weights = {
            each: parameter.detach().double().requires_grad_()
            for each, parameter in mtp_model.whole_names([model]).items()
        }
        _train([model], transformer, data)
        named = {
            **weights,
            "embedding": weights["embedding.word_embeddings.weight"],
            "output": weights["output_layer.weight"],
        }
        for share, each in zip(shares, data, strict=True):
            example = mtp_oracle.Example(
                tokens=each["tokens"],
                labels=each["labels"],
                mask=each["mask"],
                documents=_documents("one"),
                apart=False,
            )
            (share * mtp_oracle.total(mtp_oracle.losses(named, SHAPE, example), SHAPE)).backward()
        found[name] = max(
            float((parameter.main_grad.double() - weights[each].grad).norm() / weights[each].grad.norm())
            for each, parameter in mtp_model.whole_names([model]).items()
        )
    return found

"""Mixtures of experts with random published weights, in our trainer under some layout and in Hugging Face."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import mt_megatron
from mt_megatron.config.parse import load_config
from mt_megatron.convert.rank_shards import place
from mt_megatron.convert.tensors.table import Sizes, to_megatron
from mt_megatron.models.families import family_of
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.seams.schedule import run_schedule
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from mt_megatron.training.step import Shape, forward_backward, make_forward_step
from tests.parity.exact import in_fp64
from tests.parity.mixture_shapes import MTP_WEIGHT, Drawn, flags, published_model
from tests.parity.random_shapes import BATCH, _largest, _largest_gradient, sample

EXPERTS = ".mlp.experts."
LAYOUTS = {
    "one": "",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "ep2": "--expert-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}


def beside_hugging_face(
    shapes: list[Drawn], layout: str, grouped: bool, mistake: str | None = None
) -> list[dict[str, float]]:
    """For every shape the largest differences from Hugging Face in fp64, relative to the largest element: of
    the logits, the loss, and of the gradients of all but experts (``gradient``) and of ``experts``.

    What fp32 costs Hugging Face itself: ``rounding`` of all gradients, by the same measure, and ``routing``,
    how far the distance of two router logits may be off. ``mistake`` plants one, for a test of this test.
    """
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    dist.init_process_group("gloo")
    return [_compare(drawn, layout, grouped, mistake) for drawn in shapes]


def published(model: Any, further: Any) -> dict[str, Tensor]:
    """The model's tensors by the names and in the shapes that its files have."""
    # In a process group it would write on the first rank alone.
    alone = mock.patch("torch.distributed.is_initialized", return_value=False)
    with tempfile.TemporaryDirectory() as folder, alone:
        model.save_pretrained(folder)
        found = load_file(f"{folder}/model.safetensors")
    if further is not None:
        for depth, layer in enumerate(further.layers):
            prefix = f"model.layers.{model.config.num_hidden_layers + depth}."
            tensors = (*layer.named_parameters(), *layer.named_buffers())
            found |= _further_tensors(prefix, {name: tensor.detach() for name, tensor in tensors})
    return found


def _further_tensors(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer of multi-token prediction as the published files have it."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[f"{prefix}mlp.experts.{expert}.{part}.weight"] = half
        elif name == "mlp.experts.down_proj":
            for expert, one in enumerate(tensor):
                found[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = one
        else:
            found[prefix + name] = tensor
    return found


def _published_gradients(model: Any, further: Any, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """As ``published``; buffers have none and are ``buffers``."""
    holders = copy.deepcopy([model, further])
    with torch.no_grad():
        for mine, theirs in zip(holders, (model, further), strict=True):
            if theirs is None:
                continue
            for holder, parameter in zip(mine.parameters(), theirs.parameters(), strict=True):
                holder.copy_(torch.zeros_like(holder) if parameter.grad is None else parameter.grad)
    gradients = published(*holders)
    return {name: buffers.get(name, gradient) for name, gradient in gradients.items()}


def _compare(drawn: Drawn, layout: str, grouped: bool, mistake: str | None) -> dict[str, float]:
    gemm = "--moe-grouped-gemm" if grouped else "--no-moe-grouped-gemm"
    config = load_config([*flags(drawn), *LAYOUTS[layout].split(), gemm])
    theirs, further = published_model(drawn)
    with joined(config, mt_megatron.backend()) as job:
        copies = job.layout.dp
        batches = [sample(drawn | {"seed": drawn["seed"] + copy_}) for copy_ in range(copies)]
        family = family_of(config)
        trainable = build(config, job, family)
        padded = padded_vocab_size(
            drawn["vocab_size"],
            divisible_by=64,
            tensor_parallel=config.parallel.tensor_model_parallel_size,
        )
        table, sizes = family.convert_table(config), Sizes.of(config, padded)
        whole = published(theirs, further)
        weights = to_megatron(whole, table, sizes)
        bias = {name: tensor for name, tensor in whole.items() if name.endswith("e_score_correction_bias")}
        with _router_logits(theirs, further) as narrow_logits:
            _hugging_face(theirs, further, batches)
        narrow = to_megatron(_published_gradients(theirs, further, bias), table, sizes)
        with in_fp64():
            for module in filter(None, (theirs, further)):
                module.double().zero_grad()
            with _router_logits(theirs, further) as exact_logits:
                their_logits, their_loss = _hugging_face(theirs, further, batches)
            expected = to_megatron(_published_gradients(theirs, further, bias), table, sizes)
        if mistake == "swapped_experts":
            one, other = (
                f"decoder.layers.1.mlp.experts.local_experts.{index}.linear_fc1.weight" for index in (0, 1)
            )
            weights[one], weights[other] = weights[other], weights[one]
        place(weights, trainable.bare_chunks())
        trainable.optimizer.reload_model_params()

        mine = _data_parallel_rank()
        found = {}
        ours = _logits(trainable, batches[mine], drawn)
        if ours is not None:
            found["logits"] = _largest(ours, their_logits[mine])
        shape = Shape(num_microbatches=1, micro_batch_size=BATCH, seq_length=drawn["seq_length"])
        step = make_forward_step(family, job.backend.device(job.backend.current_device()))
        reports = forward_backward(trainable, step, [iter([batches[mine]])], shape)
        if reports:
            loss = (reports[0]["loss"] / reports[0]["tokens"]).item()
            found["loss"] = abs(loss / their_loss[mine] - 1)
        found["gradient"] = _largest_gradient(trainable, expected, lambda name: EXPERTS not in name)
        found["experts"] = _largest_gradient(trainable, expected, lambda name: EXPERTS in name)
        found["rounding"] = max(_largest(narrow[name], exact) for name, exact in expected.items())
        found["routing"] = 2 * max(
            float((ours - exact).abs().max()) for ours, exact in zip(narrow_logits, exact_logits, strict=True)
        )
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        return {
            name: max(each[name] for each in every if name in each)
            for name in ("logits", "loss", "gradient", "experts", "rounding", "routing")
        }


@contextmanager
def _router_logits(*models: Any) -> Iterator[list[Tensor]]:
    """The logits of every router in ``models`` (or None) at each call, in the order of the calls."""
    found: list[Tensor] = []

    def note(router: Any, arguments: tuple[Tensor, ...], _: Any) -> None:
        hidden = arguments[0].detach()
        found.append(functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight.detach()))

    routers = [
        module
        for model in models
        if model
        for name, module in model.named_modules()
        if name.endswith(".gate")
    ]
    handles = [router.register_forward_hook(note) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    assert found, "the routers have another name"


def _data_parallel_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_rank())


def _hugging_face(
    model: Any, further: Any, batches: list[dict[str, Tensor]]
) -> tuple[list[Tensor], list[float]]:
    """Logits and loss of every batch; the gradients of the mean of the losses, those of multi-token
    prediction among them, stay in the parameters."""
    logits, losses = [], []
    for batch in batches:
        hidden = model.model(batch["tokens"]).last_hidden_state
        out = model.lm_head(hidden)
        loss = _mean_loss(out, batch["labels"], batch["loss_mask"])
        total = loss
        if further is not None:
            total = total + _further_losses(model, further, hidden, batch) * MTP_WEIGHT
        (total / len(batches)).backward()
        logits.append(out.detach())
        losses.append(loss.item())
    return logits, losses


def _mean_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each * mask).sum() / mask.sum()


def _further_losses(model: Any, further: Any, hidden: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the depths of their mean losses; depth k sees the tokens up to k further on."""
    losses = []
    for depth, layer in enumerate(further.layers, start=1):
        embedded = further.embed_tokens(batch["labels"][:, depth - 1 : -1])
        hidden = hidden[:, : embedded.shape[1]]
        length = hidden.shape[1]
        positions = torch.arange(length)[None]
        lowest = torch.finfo(hidden.dtype).min
        causal = torch.full((length, length), lowest, dtype=hidden.dtype).triu(1)[None, None]
        hidden = layer(
            embedded,
            hidden,
            position_embeddings=model.model.rotary_emb(hidden, positions),
            attention_mask=causal,
            position_ids=positions,
            past_key_values=None,
        )
        logits = further.shared_head(hidden)
        losses.append(_mean_loss(logits, batch["labels"][:, depth:], batch["loss_mask"][:, depth:]))
    return torch.stack(losses).mean()


def _logits(trainable: Any, batch: dict[str, Tensor], drawn: Drawn) -> Tensor | None:
    """The whole vocabulary's logits of one batch on the last pipeline stage, else None."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def step(batches: Iterator[Any], model: torch.nn.Module) -> Any:
        one = next(batches)
        partial = model(one["tokens"], one["position_ids"], None)
        return partial, lambda out: (out.sum(), out)

    for chunk in trainable.chunks:
        chunk.eval()
    with torch.no_grad():
        results = run_schedule(
            step,
            trainable.chunks,
            [iter([batch])],
            num_microbatches=1,
            seq_length=drawn["seq_length"],
            micro_batch_size=BATCH,
            forward_only=True,
        )
    for chunk in trainable.chunks:
        chunk.train()
    if not results:
        return None
    return gather_from_tensor_model_parallel_region(results[0])[..., : drawn["vocab_size"]]

"""The ranks' side of the packing tests: one model, its documents packed, masked, and each alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parity.case import SEQUENCE, VOCABULARY, Layout, config_of

END = VOCABULARY - 1
LENGTHS = ((8, 2, 20, 2), (SEQUENCE - 6, 6))
"""Tokens of the documents of both rows, even for sequence parallelism; SEQUENCE in all."""


def tokens() -> Tensor:
    """Two rows of documents [2, SEQUENCE], each but the last of a row with its end."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(VOCABULARY - 1, (2, SEQUENCE + 1), generator=generator)
    for row, lengths in enumerate(LENGTHS):
        assert sum(lengths) == SEQUENCE
        for end in torch.tensor(lengths[:-1]).cumsum(0).tolist():
            drawn[row, end - 1] = END
    return drawn


def batch_of(drawn: Tensor, **more: Tensor) -> dict[str, Tensor]:
    """A loader's batch of rows [b, s + 1]; every fifth token does not count."""
    counts = torch.arange(drawn.size(1) - 1).expand(len(drawn), -1) % 5 > 0
    return {
        "tokens": drawn[:, :-1].contiguous(),
        "labels": drawn[:, 1:].contiguous(),
        "loss_mask": counts.float(),
        "position_ids": torch.arange(drawn.size(1) - 1).expand(len(drawn), -1).contiguous(),
        **more,
    }


def separating_mask() -> Tensor:
    """By the definition, from LENGTHS: [2, 1, s, s], True where attending is forbidden."""
    mask = torch.ones(2, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            for query in range(start, start + length):
                mask[row, 0, query, start : query + 1] = False
            start += length
    return mask


def run(model: Any, family: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Per-token losses of ``batches`` one after another, and the gradient of their sum."""
    model.zero_grad()
    losses = []
    for batch in batches:
        output, _ = family.loss(model, family.get_batch(iter([batch]), torch.device("cpu")))
        output.float().sum().backward()
        losses.append(output.detach().float().flatten())
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            # Each rank has the tokens of its part: Megatron adds them up when gradients are finalised.
            dist.all_reduce(parameter.grad)
    grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return {"losses": torch.cat(losses), "gradient": torch.cat(grads)}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[float]:
    """Largest difference of losses, and that of gradients against the largest gradient."""
    return [
        float((a["losses"] - b["losses"]).abs().max()),
        float((a["gradient"] - b["gradient"]).abs().max() / b["gradient"].abs().max()),
    ]


def of_one_layout(flags: str, bf16: bool) -> dict[str, list[float]]:
    import mt_megatron
    from mt_megatron.layers.attention.packed_sequences import document_borders
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined

    # The bare model has no main_grad to add to.
    flags += " --no-gradient-accumulation-fusion"
    config = config_of(Layout(name="any", flags=flags), seed=1, bf16=bf16)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        torch.manual_seed(3)
        (model,) = family.build_model(config, job.layout)
        drawn = tokens()
        packed = batch_of(drawn, cu_seqlens=document_borders(drawn[:, :-1], END))
        alone, start = [], 0
        for row, lengths in enumerate(LENGTHS):
            start = 0
            for length in lengths:
                alone.append(batch_of(drawn[row : row + 1, start : start + length + 1]))
                start += length
        found = run(model, family, [packed])
        return {
            "masked": difference(
                found, run(model, family, [batch_of(drawn, attention_mask=separating_mask())])
            ),
            "alone": difference(found, run(model, family, alone)),
            "not reset": difference(found, run(model, family, [batch_of(drawn)])),
            "one row": difference(
                run(
                    model,
                    family,
                    [batch_of(drawn[1:], cu_seqlens=torch.tensor([0, SEQUENCE - 6, SEQUENCE]).int())],
                ),
                run(model, family, alone[len(LENGTHS[0]) :]),
            ),
        }


def of_a_pipeline(flags: str) -> dict[str, list[float]]:
    """Two stages, four micro-batches: loss and gradient packed, masked, and without reset."""
    import mt_megatron
    from mt_megatron.layers.attention.packed_sequences import document_borders
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build
    from mt_megatron.training.step import Shape, forward_backward, make_forward_step

    config = config_of(Layout(name="pp", flags=flags), seed=1)
    results: dict[str, list[float]] = {}
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        drawn = tokens()
        kinds = {
            "packed": {"cu_seqlens": document_borders(drawn[:, :-1], END)},
            "masked": {"attention_mask": separating_mask()},
            "not reset": {},
        }
        shape = Shape(num_microbatches=4, micro_batch_size=2, seq_length=SEQUENCE)
        step = make_forward_step(family, torch.device("cpu"))
        for name, more in kinds.items():
            batches = [iter([batch_of(drawn, **more)] * 4) for _ in trainable.chunks]
            reports = forward_backward(trainable, step, batches, shape)
            loss = sum(float(report["loss"]) for report in reports)
            grads = [p.main_grad.flatten() for chunk in trainable.chunks for p in chunk.parameters()]
            results[name] = [loss, float(torch.cat(grads).double().norm())]
    return results


def what_a_context_rank_gets() -> dict[str, Any]:
    """The mask that a rank of two makes of borders, and of a mask given: equal to the definition."""
    import mt_megatron
    from mt_megatron.layers.attention.packed_sequences import document_borders
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined

    config = config_of(Layout(name="cp2", flags="--context-parallel-size 2"), seed=1)
    with joined(config, mt_megatron.backend()):
        family = family_of(config)
        drawn = tokens()
        borders = batch_of(drawn, cu_seqlens=document_borders(drawn[:, :-1], END))
        mask = batch_of(drawn, attention_mask=separating_mask())
        device = torch.device("cpu")
        one, other = (family.get_batch(iter([batch]), device) for batch in (borders, mask))
        return {
            "equal": torch.equal(one["attention_mask"], other["attention_mask"]),
            "shape": list(one["attention_mask"].shape),
            "packed": "cu_seqlens" in one,
        }


def everything(world: int) -> dict[str, Any]:
    import mt_megatron

    mt_megatron.patch("cpu")
    dist.init_process_group("gloo")
    if world == 1:
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        cases = {
            "plain": ("", False),
            "recompute": (full, False),
            "selective": ("--recompute-granularity selective", False),
            "bf16": ("", True),
        }
        return {name: of_one_layout(*case) for name, case in cases.items()}
    tensor = "--tensor-model-parallel-size 2"
    stages = "--pipeline-model-parallel-size 2"
    return {
        "tp2": of_one_layout(tensor, False),
        "tp2_sp": of_one_layout(f"{tensor} --sequence-parallel", False),
        "cp2": what_a_context_rank_gets(),
        "pp2": of_a_pipeline(stages),
        "pp2_recompute": of_a_pipeline(
            f"{stages} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        ),
    }

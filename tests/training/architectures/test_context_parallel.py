"""Training with context parallelism: batches, losses, dropout, checkpoints, validation, documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.parity.case import SEQUENCE, Chain, Layout, config_of

HERE = "tests.training.architectures.test_context_parallel:"
LOOP = "tests.training.loop_cases:"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CP2 = "--context-parallel-size 2"


@pytest.mark.soak
@pytest.mark.parametrize(
    "flags", [DROPOUT, f"{PLAIN} {ZERO1} --bf16 --cp-comm-type p2p"], ids=["dropout", "ring_zero1_bf16"]
)
def test_a_resumed_run_continues_to_the_bit(tmp_path: Path, flags: str) -> None:
    layouts = {"only": f"{CP2} {flags}"}
    found = run_ranks(2, LOOP + "interrupted_and_not", str(tmp_path), layouts, timeout=200)[0]["only"]
    whole, first, second = (found[part] for part in ("whole", "first", "second"))
    assert {**first["steps"], **second["steps"]} == whole["steps"] and len(whole["steps"]) == 6
    assert second["valid"][-1] == whole["valid"][-1]
    assert second["finished"] and second["consumed_samples"] == 48


@pytest.mark.parametrize(
    "flags",
    [
        ZERO1,
        pytest.param("--tensor-model-parallel-size 2 --use-distributed-optimizer", marks=pytest.mark.soak),
    ],
    ids=["data", "tensor"],
)
def test_a_checkpoint_moves_between_context_and_other_parallelism(tmp_path: Path, flags: str) -> None:
    plain = f"{PLAIN} --calculate-per-token-loss"
    before, after = f"{CP2} {plain} {ZERO1}", [f"{plain} {flags}"]
    found = run_ranks(2, LOOP + "moved_between_layouts", str(tmp_path), before, after, timeout=200)[0]
    whole, [continued] = found["whole"], found["continued"]
    assert "error" not in continued, continued
    for step in ("4", "5", "6"):
        assert continued["steps"][step] == pytest.approx(whole["steps"][step], rel=1e-5)
    assert continued["valid"][-1] == pytest.approx(whole["valid"][-1], rel=1e-6)


@pytest.mark.soak
def test_validation_counts_every_token_once(tmp_path: Path) -> None:
    layouts = [PLAIN, f"{PLAIN} {CP2}", f"{PLAIN} {CP2} --cp-comm-type p2p"]
    found = run_ranks(2, LOOP + "validations", str(tmp_path), layouts, 13, [None, 5], timeout=200)
    data = Chain(5, 13)
    for rank in found:
        for results in rank:
            for (loss, tokens), expected, count in zip(results, found[0][0], (13, 5), strict=True):
                assert tokens == int(sum(data[i]["loss_mask"].sum() for i in range(count)))
                assert loss == pytest.approx(expected[0], rel=1e-6)


def documents(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch whose sequences are two documents each, of unequal lengths."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).repeat(len(samples), 1, 1, 1)
    for index, border in enumerate((9, 20)):
        mask[index, :, border:, :border] = True
    return {**batch, "attention_mask": mask}


def losses_of_documents() -> dict[str, list[float]]:
    """Sum of losses, tokens, and gradient norm of one batch with a mask of documents, by layout."""
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined

    data = Chain(3, 2)
    found: dict[str, list[float]] = {}
    learned = f"--position-embedding-type learned_absolute --max-position-embeddings {SEQUENCE}"
    layouts = {
        "data": "",
        "context": CP2,
        "ring": f"{CP2} --cp-comm-type p2p",
        "data, learned": learned,
        "context, learned": f"{CP2} {learned}",
    }
    for name, flags in layouts.items():
        # Without DDP's buffers for the gradients.
        flags += " --no-gradient-accumulation-fusion"
        with joined(config_of(Layout(name=name, flags=flags), seed=1), mt_megatron.backend()) as job:
            for masked in (True, False):
                config = config_of(Layout(name=name, flags=flags), seed=1)
                family = family_of(config)
                torch.manual_seed(1)
                model = family.build_model(config, job.layout)[0]
                batch = documents([data[0], data[1]])
                if not masked:
                    del batch["attention_mask"]
                mine = family.get_batch(iter([batch]), torch.device("cpu"))
                output, loss = family.loss(model, mine)
                value, report = loss(output)
                value.backward()
                share = 1.0 / job.layout.cp
                grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
                gradient = torch.cat(grads) * share
                totals = torch.stack([report["loss"], report["tokens"], share * value.detach().double()])
                if job.layout.cp > 1:
                    dist.all_reduce(gradient)
                    dist.all_reduce(totals)
                key = f"{name}{'' if masked else ' without mask'}"
                found[key] = [*totals.tolist(), float(gradient.norm()), float(gradient[5])]
    return found


def what_a_rank_gets() -> list[Any]:
    """This rank's batch, the sum of its weights, and the first numbers that its dropout would draw."""
    import mt_megatron
    from mt_megatron.models.families import family_of
    from mt_megatron.training.distributed import joined
    from mt_megatron.training.model import build

    config = config_of(Layout(name="cp2", flags=CP2), seed=1)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        numbers = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
        mask = torch.arange(SEQUENCE * SEQUENCE).view(1, 1, SEQUENCE, SEQUENCE).expand(2, -1, -1, -1)
        batch = {
            "tokens": numbers,
            "labels": numbers + 1,
            "loss_mask": (numbers % 5 > 0).float(),
            "position_ids": torch.arange(SEQUENCE).expand(2, -1),
            "attention_mask": mask,
        }
        mine = family.get_batch(iter([batch]), torch.device("cpu"))
        weights = sum(float(p.detach().double().sum()) for p in trainable.chunks[0].parameters())
        return [
            {name: value.tolist() for name, value in mine.items()},
            {name: value.tolist() for name, value in batch.items()},
            weights,
            torch.rand(4).tolist(),
        ]


def batches() -> dict[str, Any]:
    import torch.distributed as dist

    import mt_megatron

    mt_megatron.patch("cpu")
    dist.init_process_group("gloo")
    return {"documents": losses_of_documents(), "rank": what_a_rank_gets()}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(2, HERE + "batches")


def test_a_mask_of_documents_means_the_same(ranks: list[Any]) -> None:
    for found in (rank["documents"] for rank in ranks):
        for name in ("context", "ring"):
            assert found[name] == pytest.approx(found["data"], rel=1e-5)
            assert found[f"{name} without mask"] == pytest.approx(found["data without mask"], rel=1e-5)
        for masked in ("", " without mask"):
            expected = found[f"data, learned{masked}"]
            assert found[f"context, learned{masked}"] == pytest.approx(expected, rel=1e-5)
        assert abs(found["data"][0] / found["data without mask"][0] - 1) > 1e-4


def test_a_rank_gets_its_two_chunks_and_random_numbers_of_its_own(ranks: list[Any]) -> None:
    found = [rank["rank"] for rank in ranks]
    quarter = SEQUENCE // 4
    for rank, (mine, whole, _, _) in enumerate(found):
        places = [*range(rank * quarter, (rank + 1) * quarter)]
        places += range((3 - rank) * quarter, (4 - rank) * quarter)
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert mine[name] == [[row[place] for place in places] for row in whole[name]], name
        assert mine["attention_mask"] == [[[row[0][p] for p in places]] for row in whole["attention_mask"]]
        assert mine["counted_tokens"] == sum(map(sum, whole["loss_mask"]))
    assert found[0][2] == found[1][2], "the ranks started from different weights"
    assert found[0][3] != found[1][3], "the ranks drop the same activations of different tokens"

"""The output layer in FP8: its products with the loss, its place in reports, checks and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mt_megatron.cli.main import main
from mt_megatron.config.parse import load_config
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.recipe import CONTRACTED, PRESETS
from mt_megatron.fp8.state import Fp8State, Options
from mt_megatron.planning.fp8_report import fp8_cost, fp8_report
from mt_megatron.planning.validate.fp8 import fp8_layer_problems
from mt_megatron.seams.gemm import WeightRef
from tests.fp8.cases import MODEL
from tests.launch import run_ranks

CASES = "tests.fp8.cases"
RECIPE = "--fp8-recipe tensorwise"
HEAD = f"{RECIPE} --fp8-output-layer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LINEARS = 4 * 4


def inputs(counts: dict[str, int]) -> int:
    return counts.get("input.0", 0) + counts.get("input.1", 0)


def parts(name: str) -> tuple[torch.nn.Parameter, Fp8State]:
    generator = torch.Generator().manual_seed(4)
    # Small logits: what rounds them twice to bf16 must not show in the gradients.
    weight = torch.nn.Parameter(0.1 * torch.randn(96, 64, generator=generator).bfloat16())
    state = Fp8State(PRESETS[name], Options())
    linear = Fp8Linear(state, "output_layer", weight)
    state.add(linear)
    weight.gemm_recipe = linear  # type: ignore[attr-defined]
    return weight, state


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_losses_and_gradients_are_those_of_decoded_operands(
    name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside float64 arithmetic on what the casts stand for, block of tokens by block."""
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.loss.cross_entropy_blocks import Blocks

    recipe, rows = PRESETS[name], 48
    weight, state = parts(name)
    monkeypatch.setattr(Blocks, "_row_counts", lambda self: (rows // blocks, rows // blocks))
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, 64, generator=generator).bfloat16()
    labels = torch.randint(0, 96, (rows,), generator=generator)

    def computed() -> tuple[Tensor, Tensor, Tensor]:
        made = Blocks(
            hidden,
            weight.detach(),
            labels,
            first=0,
            vocab_size=None,
            group=None,
            reference=WeightRef(weight),
        )
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros(96, 64)
        losses, _ = made.losses(torch.ones(rows), of_hidden, of_weight)
        return losses, of_hidden, of_weight

    with state.stepping(forward_only=False):
        results = computed()
        counts = dict(state.counts)
    assert counts["weight.1"] == 1 and "weight.0" not in counts, "one set of codes for both layouts"
    assert inputs(counts) == (1 if recipe.shares_input_codes else 2) * blocks

    def stands_for(role: Any, side: int, x: Tensor) -> Tensor:
        product = recipe.product(role)
        made = quantise(x, product.b if side else product.a, CONTRACTED[role][side])
        return made.dequantised(torch.float32).double()

    expected, of_hidden, of_weight = [], [], torch.zeros(96, 64, dtype=torch.float64)
    for part, here in zip(hidden.chunk(blocks), labels.chunk(blocks), strict=True):
        logits = stands_for("fprop", 0, part) @ stands_for("fprop", 1, weight.detach()).t()
        logits = logits.bfloat16().double()
        expected.append(F.cross_entropy(logits, here, reduction="none"))
        gradient = (logits.softmax(-1) - F.one_hot(here, 96)).bfloat16()
        of_hidden.append(stands_for("dgrad", 0, gradient) @ stands_for("dgrad", 1, weight.detach()))
        of_weight += stands_for("wgrad", 0, gradient).t() @ stands_for("wgrad", 1, part)
    del weight.gemm_recipe  # type: ignore[attr-defined]
    wanted = (torch.cat(expected), torch.cat(of_hidden), of_weight)
    for found, truth, bf16, limit in zip(results, wanted, computed(), (4e-3, 0.01, 0.01), strict=True):
        off, without = (float((each.double() - truth).norm() / truth.norm()) for each in (found, bf16))
        assert off < limit < without, "and bf16 is further away"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("weights"))
    layouts = {
        "without": RECIPE,
        "fused": HEAD,
        "unfused": f"{HEAD} --no-cross-entropy-loss-fusion",
        "gathered": f"{HEAD} --use-distributed-optimizer --fp8-param-gather",
    }
    return folder, dict(run_ranks(1, f"{CASES}:trained", folder, layouts, 4, timeout=150)[0])


def test_training_with_the_output_layer(alone: tuple[str, dict[str, Any]]) -> None:
    found = alone[1]
    assert "output_layer" in found["fused"]["rows"] and "output_layer" not in found["without"]["rows"]
    assert found["fused"]["losses"] != found["without"]["losses"]
    for name in ("fused", "unfused", "gathered"):
        assert found[name]["losses"] == pytest.approx(found["without"]["losses"], rel=0.01), name
        counts = found[name]["counts"]
        assert counts["weight.1"] == LINEARS + 1, "once a step"
    # One block of tokens: the same casts with and without the fused loss.
    assert inputs(found["unfused"]["counts"]) == inputs(found["fused"]["counts"])
    assert found["unfused"]["losses"] == pytest.approx(found["fused"]["losses"], rel=1e-3)


def test_two_tensor_parallel_ranks(alone: tuple[str, dict[str, Any]]) -> None:
    folder, single = alone
    layouts = {"sp": f"{HEAD} {TP2}", "sp unfused": f"{HEAD} {TP2} --no-cross-entropy-loss-fusion"}
    ranks = run_ranks(2, f"{CASES}:trained", folder, layouts, 4, timeout=150)
    for found in ranks:
        for name in layouts:
            assert found[name]["losses"] == pytest.approx(single["fused"]["losses"], rel=5e-3), name


def test_the_report_and_the_plan_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = f"{MODEL} --lr 1e-3 --train-iters 2 {RECIPE}".split()
    without, found = fp8_report(load_config(argv)), fp8_report(load_config([*argv, "--fp8-output-layer"]))
    assert "fp8_output_layer" in without["output_layer"]["reason"]
    assert found["output_layer"]["reason"] is None and found["output_layer"]["outputs"] == 128
    decoder = 4 * (64 * 192 + 64 * 64 + 64 * 256 + 128 * 64)
    assert found["output_layer"]["share"] == pytest.approx(64 * 128 / decoder)
    assert found["share"] == without["share"], "of the decoder's linears"
    costs = [fp8_cost(load_config([*argv, *more])) for more in ([], ["--fp8-output-layer"])]
    assert costs[0] is not None and costs[1] is not None
    assert costs[1]["flops_per_token"] - costs[0]["flops_per_token"] == 6 * 64 * 128
    assert main(["fp8", "report", *argv, "--fp8-output-layer"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "output_layer" in line]
    assert "64 x 128" in line and "FP8" in line and "bf16" not in line


def test_bad_input_is_refused() -> None:
    argv = f"{MODEL} --lr 1e-3 --train-iters 2".split()
    odd = [*argv, *RECIPE.split(), "--fp8-output-layer", "--make-vocab-size-divisible-by", "1"]
    odd += ["--vocab-size", "100"]
    assert any("expected a multiple of 16 on each" in line for line in fp8_layer_problems(load_config(odd)))
    from mt_megatron.fp8.checks import fp8_problems

    assert any(
        "fp8_output_layer without fp8_recipe" in line for line in fp8_problems({"fp8_output_layer": True})
    )


def test_a_tied_embedding_is_read_as_it_is_and_a_checkpoint_goes_both_ways(tmp_path: Path) -> None:
    [found] = run_ranks(1, "tests.fp8.resumed:output_layer", str(tmp_path), timeout=150)
    assert found["tied"]["gathers"] is False and found["tied"]["finite"]
    for name in ("on", "off"):
        assert found[name].get("iteration", 0) == 5, found[name]
    assert "FP8 state of 1 linear(s) starts anew" in found["notes"]
    assert "FP8 state of 1 linear(s) that stay in bf16 now is left: output_layer" in found["notes"]

"""Telemetry, demotion, the report and its picture; plan and checks before the start."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_megatron.cli.main import main
from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.quantise import Quantised, quantise, rotated
from mt_megatron.fp8.recipe import CONTRACTED, OPERANDS, PRESETS, ROLES, Cast
from mt_megatron.fp8.state import Fp8State, Options
from mt_megatron.fp8.telemetry import FIELDS, Telemetry, _reason, measures
from mt_megatron.planning.fp8_report import fp8_cost, fp8_report
from mt_megatron.planning.memory_estimate import memory_of
from mt_megatron.planning.validate.fp8 import fp8_layer_problems
from mt_megatron.training.logging.fp8_picture import picture
from mt_megatron.training.logging.fp8_records import Fp8Records
from tests.fp8.cases import MIXTURE, MODEL
from tests.launch import run_ranks

TENSOR = PRESETS["tensorwise"].fprop.a
FLAGS = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 128 "
    "--position-embedding-type rope --seq-length 32 --swiglu --disable-bias-linear --micro-batch-size 1 "
    "--train-iters 4 --lr 1e-3"
)
SMALL = FLAGS.split()


def measured(x: torch.Tensor, **how: Any) -> dict[str, float]:
    return dict(zip(FIELDS, measures(x, quantise(x, TENSOR, 1, **how)).tolist(), strict=True))


def test_measures_are_those_of_a_hand_count() -> None:
    x = torch.ones(16, 128)
    x[:, :32] = 1e-7  # below half of e4m3's smallest number at this scale
    x[:, 32:40] = 0
    found = measured(x)
    assert found["underflow"] == pytest.approx(32 / 120)
    assert found["saturation"] == 0 and found["not_finite"] == 0
    assert found["scale"] == pytest.approx(torch.tensor(448.0).log2().item(), abs=1e-4)
    found = measured(x, scale=torch.tensor(1000.0))
    assert found["saturation"] == pytest.approx(88 / 120), "1000 is beyond 448"
    x[0, 0] = float("nan")
    assert measured(x)["not_finite"] == pytest.approx(1 / x.numel())


def test_snr_is_the_median_over_blocks() -> None:
    """One outlier ruins its tensor's scale for all; the energy of all together would not show it."""
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    good = measured(x)["snr"]
    x[0, 0] = 3e7
    bad = measured(x)["snr"]
    assert good > 25 and bad < 1


CASTS = {
    (cast, along): f"{name}-{role}-{kind}"
    for name, recipe in PRESETS.items()
    for role in ROLES
    for kind, along in zip(OPERANDS[role], CONTRACTED[role], strict=True)
    if (cast := recipe.cast(role, kind)).quantised
}


def by_hand(x: torch.Tensor, made: Quantised) -> dict[str, float]:
    """``FIELDS`` of whole tensors in fp64, from what the codes stand for."""
    cast, along = made.cast, made.along
    source, decoded = x.float(), made.dequantised()
    if cast.hadamard:
        # What is cast is the rotated tensor.
        assert made.outer is not None
        source, decoded = rotated(source, along, cast.hadamard), made.values(torch.float32) * made.outer
    clean, decoded = source.double(), decoded.double().nan_to_num(nan=0.0)
    blocks = [
        (row[start : start + 128], other[start : start + 128])
        for row, other in zip(clean, decoded, strict=True)
        for start in range(0, clean.shape[1] - 127, 128)
    ]
    ratios = sorted(
        min(100.0, 10 * math.log10(a.square().sum() / max(1e-38, (a - b).square().sum())))
        for a, b in blocks
        if a.any()
    )
    lost = (decoded == 0) & (clean != 0)
    scales = sorted(made.inverse.flatten().tolist())
    return {
        "underflow": float(lost.sum() / (clean != 0).sum()),
        "snr": ratios[(len(ratios) - 1) // 2],
        "scale": -math.log2(scales[(len(scales) - 1) // 2]),
    }


@pytest.mark.parametrize(("cast", "along"), CASTS, ids=CASTS.values())
@pytest.mark.parametrize("shape", [(112, 256), (1024, 256)], ids=["all rows", "sampled"])
def test_measures_are_those_of_whole_tensors(cast: Cast, along: int, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(12)
    x[::3] *= 1e-3
    x = x.bfloat16()
    made = quantise(x, cast, along, generator=generator)
    found = dict(zip(FIELDS, measures(x, made).tolist(), strict=True))
    wanted = by_hand(x, made)
    whole = shape[0] == 112
    assert found["snr"] == pytest.approx(wanted["snr"], abs=0.01 if whole else 1.5)
    assert found["underflow"] == pytest.approx(wanted["underflow"], abs=1e-4 if whole else 0.02)
    assert found["scale"] == pytest.approx(wanted["scale"], abs=1e-4 if whole else 0.5)
    # Scales that are rounded to e4m3 leave some block's largest magnitude beyond the range.
    assert found["not_finite"] == 0 and found["saturation"] <= (0.01 if cast.block_scale == "e4m3" else 0)
    # The source of other codes is far from what they stand for.
    assert measures(x.roll(1, 0), made)[FIELDS.index("snr")] < found["snr"] - 6


def test_a_layer_that_passes_a_threshold_falls_back_on_all_ranks(tmp_path: Path) -> None:
    flags = "--fp8-recipe tensorwise --fp8-telemetry-interval 2 --fp8-demote-snr 200"
    layouts = {"demoted": flags, "not": flags.replace("200", "-200"), "bf16": ""}
    run_ranks(1, "tests.fp8.cases:trained", str(tmp_path), {"bf16": ""}, 1, timeout=60)
    found = run_ranks(2, "tests.fp8.cases:trained", str(tmp_path), layouts, 6, timeout=100)
    for rank in found:
        assert all(row[0] == 1.0 for row in rank["demoted"]["rows"].values()), "everything is below 200 dB"
        assert not any(row[0] for row in rank["not"]["rows"].values())
        losses = {name: rank[name]["losses"] for name in layouts}
        assert losses["demoted"][:2] == losses["not"][:2], "decided after the second step"
        assert losses["demoted"][3:] != losses["not"][3:]


@pytest.mark.parametrize("stage", [None, 0, 1])
def test_a_demotion_is_said_in_scripts_and_by_every_stage(
    stage: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``stage`` None: no trainer. In a run of the trainer the display is that of the first stage."""
    monkeypatch.setattr(Fp8State, "reduce_max", lambda *unused: None)
    state = Fp8State(PRESETS["tensorwise"], Options(telemetry_interval=1, demote_snr=20.0))
    module = torch.nn.Linear(16, 16)
    linear = Fp8Linear(state, "layers.0.mlp.linear_fc1", module.weight)
    state.add(linear)
    weight: Any = module.weight
    weight.gemm_recipe = linear
    telemetry = state.telemetry = Telemetry()
    shown: list[str] = []
    if stage is not None:
        job: Any = SimpleNamespace(is_main=stage == 0, at=SimpleNamespace(pp=stage, tp=0, dp=0, cp=0))
        config = load_config([*SMALL, "--fp8-recipe", "tensorwise"])
        Fp8Records(config, job, [module], shown.append if stage == 0 else lambda line: None)
    take_back = state.snapshot()
    telemetry._measured[linear.name, "input", "fprop"] = torch.tensor([0.0, 0.0, 0.0, 10.0, 0.0])
    state.step = 1
    telemetry.complete(state)
    assert linear.demoted
    take_back()
    take_back()
    assert not linear.demoted
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    said = shown if stage == 0 else warned
    assert "fp8: layers.0.mlp.linear_fc1 falls back to bf16" in said[-2]
    assert said[-1] == ("fp8: layers.0.mlp.linear_fc1 does not fall back after all: step 1 is taken back")


def test_a_search_for_a_nan_demotes_and_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that it repeats has said and written everything."""
    from mt_megatron.training import steps

    state = Fp8State(PRESETS["tensorwise"], Options(telemetry_interval=1, demote_snr=20.0))
    module = torch.nn.Linear(16, 16)
    weight: Any = module.weight
    weight.gemm_recipe = Fp8Linear(state, "layers.0.mlp.linear_fc1", module.weight)
    kept = state.telemetry = Telemetry()
    seen: list[Any] = []
    monkeypatch.setattr(steps, "first_finding", lambda *unused: seen.append(state.telemetry))
    monkeypatch.setattr(steps.RandomStates, "now", lambda job: SimpleNamespace(restore=lambda job: None))
    run: Any = SimpleNamespace(
        _trainable=SimpleNamespace(chunks=[module]),
        _fp8_before=[],
        _again=lambda: None,
        _batches_after=lambda progress, num_workers: [],
        _forward_step=None,
        _job=None,
    )
    steps.Steps._explain(run, None, None, None)  # type: ignore[arg-type]
    assert seen == [None] and state.telemetry is kept


def test_a_run_keeps_telemetry_and_its_demotions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--fp8-recipe blockwise --fp8-telemetry-interval 1 --fp8-demote-snr 200"
    [found] = run_ranks(1, "tests.fp8.resumed:stopped_at", str(tmp_path), flags, [2], 4, timeout=100)
    assert found["parts"] == found["whole"], "resumed with its demotions, to the bit"
    records = [json.loads(line) for line in (tmp_path / "whole.fp8.stage0.jsonl").open()]
    assert {record["step"] for record in records} == {1}, "nothing is cast after all has fallen back"
    assert any(record.get("demoted") for record in records)
    assert main(["fp8", "report", str(tmp_path / "whole"), "--picture", str(tmp_path / "a.svg")]) == 0
    said = capsys.readouterr().out
    assert "bf16: demoted after step 1" in said and "recipe blockwise: 0.0 %" in said
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    # One checkpoint: what was known at its step, and nothing of later ones.
    assert main(["fp8", "report", str(tmp_path / "parts" / "iter_0000002"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all("demoted after step 1" in row["reason"] for row in report["linears"])
    os.rename(tmp_path / "parts" / "iter_0000002", tmp_path / "parts" / "iter_0000000")
    assert main(["fp8", "report", str(tmp_path / "parts" / "iter_0000000"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not any(row["reason"] or row["telemetry"] for row in report["linears"])
    assert main(["fp8", "report", str(tmp_path)]) == 2
    assert "of one of its checkpoints" in capsys.readouterr().err


def test_the_picture_has_a_cell_for_each_sample() -> None:
    rows = [
        {"step": step, "linear": f"layers.{layer}.mlp.linear_fc1", "operand": "input", "role": "fprop"}
        | {"snr": 10.0 * layer, "underflow": 0.5 * layer, "saturation": 0.0}
        for step in (10, 20)
        for layer in (0, 1, 10)
    ]
    text = picture(rows)
    assert text.count("<title>") == 6 and text.count("<circle") == 4
    assert text.index("layers.1.") < text.index("layers.10.")


def test_ticks_stand_at_the_cells_of_their_steps_and_do_not_overlap() -> None:
    rows = [
        {"step": step, "linear": "layers.0.mlp.linear_fc1", "operand": "input", "role": "fprop"}
        | {"snr": 10.0, "underflow": 0.0, "saturation": 0.0}
        for step in range(1000, 61000, 1000)
    ]
    text = picture(rows)
    cells = {
        int(step): float(x) + 6.5
        for x, step in re.findall(r'<rect x="([\d.]+)"[^>]*><title>step (\d+)', text)
    }
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle" class="step">(\d+)<', text)
    assert len(cells) == 60 and len({y for _, y, _ in labels}) == 2, "above and below"
    assert all(cells[int(step)] == float(x) for x, _, step in labels)
    places = sorted({float(x) for x, _, _ in labels})
    assert all(b - a >= 5 * 5.5 for a, b in zip(places, places[1:], strict=False)) and len(places) > 6
    bar = {
        int(value): float(x) for x, value in re.findall(r'<text x="([\d.]+)"[^>]*class="snr">(\d+)<', text)
    }
    assert bar[5] == 8 and bar[40] == 188 and bar[20] == pytest.approx(8 + 180 * 15 / 35, abs=1e-3)


def test_the_report_counts_shares_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config([*SMALL, "--fp8-recipe", "rowwise_gw_hp"])
    found = fp8_report(config)
    layer = 64 * 192 + 64 * 64 + 64 * 256 + 128 * 64
    assert [row["share"] for row in found["linears"][:2]] == [64 * 192 / layer / 4, 64 * 64 / layer / 4]
    assert found["share"] == pytest.approx(2 / 4 * 2 / 3), "two of four layers, two of three products"
    reasons = {row["linear"].split(".")[1]: row["reason"] for row in found["linears"]}
    assert reasons["1"] is None and "num_layers_at_start_in_bf16" in reasons["0"]
    assert main(["fp8", "report", *SMALL, "--fp8-recipe", "blockwise", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["share"] == pytest.approx(0.5)
    assert main(["fp8", "report", *SMALL]) == 2
    assert "expected --fp8-recipe NAME" in capsys.readouterr().err
    assert main(["fp8", "recipes"]) == 0
    assert "musa from 3.1" in capsys.readouterr().out


def test_a_demotion_whose_step_was_undone_is_no_reason() -> None:
    config = load_config([*SMALL, "--fp8-recipe", "blockwise"])
    name = fp8_report(config)["linears"][-5]["linear"]
    about = {"linear": name, "operand": "input", "role": "fprop", "recipe": "blockwise"}
    records = [{**about, "step": 2}, {**about, "step": 4, "demoted": "input of fprop has ..."}]
    records.append({**about, "role": "dgrad", "step": 4})  # measured before the linear was demoted
    for more, demoted in (([], True), ([{**about, "step": 6}], False)):
        rows = {row["linear"]: row["reason"] for row in fp8_report(config, [*records, *more])["linears"]}
        assert (rows[name] == "demoted after step 4: input of fprop has ...") == demoted


def test_elements_that_are_not_finite_demote_nothing() -> None:
    """Measures of a tensor with one of them are the worst there are."""
    state: Any = SimpleNamespace(options=Options(demote_underflow=0.1, demote_saturation=0.1, demote_snr=20))
    bad = {"underflow": 0.5, "saturation": 0.5, "not_finite": 1e-6, "snr": -100.0, "scale": 0.0}
    assert _reason(bad, state) is None
    assert "50.00 % underflow" in str(_reason({**bad, "not_finite": 0.0}, state))


def test_a_mixture_names_the_linears_that_are_built() -> None:
    config = load_config(f"{MODEL} {MIXTURE} --fp8-recipe tensorwise --lr 1e-3 --train-iters 2".split())
    names = {row["linear"] for row in fp8_report(config)["linears"]}
    built = run_ranks(1, "tests.fp8.cases:names", f"{MIXTURE} --fp8-recipe tensorwise")[0]
    assert set(built) == names


def test_the_plan_counts_operations() -> None:
    config = load_config([*SMALL, "--fp8-recipe", "blockwise", "--no-first-last-layers-bf16"])
    cost = fp8_cost(config)
    layer = 64 * 192 + 64 * 64 + 64 * 256 + 128 * 64
    assert cost is not None
    assert cost["flops_per_token"] == 6 * 4 * layer
    assert cost["saved_inputs"] == "params dtype"
    assert fp8_cost(load_config(SMALL)) is None


def test_the_plans_total_counts_what_a_step_keeps_of_cast_weights() -> None:
    """Beside the bytes that are really kept: codes, scales and decoded values, on each stage."""
    layouts = {
        "shared codes": "--fp8-recipe tensorwise --tensor-model-parallel-size 2 --fp8-output-layer",
        "two layouts": "--fp8-recipe mxfp8 --pipeline-model-parallel-size 2",
        "experts": f"--fp8-recipe blockwise {MIXTURE} --expert-model-parallel-size 2",
        "four bits": "--fp8-recipe nvfp4 --pipeline-model-parallel-size 2 --first-last-layers-bf16",
    }
    for found in run_ranks(2, "tests.fp8.cases:kept_casts", layouts, timeout=150):
        for name, each in found.items():
            assert each["planned"] == pytest.approx(each["kept"], rel=0.01), (name, each)
            assert each["beside"] == each["planned"] > 0


def test_a_device_keeps_codes_and_scales_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def casts(flags: str, on_cpu: bool = False) -> int:
        config = load_config([*SMALL, "--no-first-last-layers-bf16", "--bf16", *flags.split()])
        return memory_of(config, 1, on_cpu=on_cpu).stages[0].casts

    weights = 4 * (64 * 192 + 64 * 64 + 64 * 256 + 128 * 64)
    # Kernels read codes in two layouts, also those that two products share.
    assert casts("--fp8-recipe tensorwise") == 2 * weights
    assert casts("--fp8-recipe tensorwise --fp8-backend reference") == 3 * weights
    assert casts("--fp8-recipe tensorwise", on_cpu=True) == 3 * weights
    assert casts("--fp8-recipe rowwise") == 2 * weights
    assert casts("--fp8-recipe mxfp8") == round(2 * weights * (1 + 1 / 32))
    assert casts("--fp8-recipe nvfp4") == round(2 * weights * (0.5 + 1 / 256))
    assert casts("") == 0
    assert main(["plan", *SMALL, "--bf16", "--fp8-recipe", "tensorwise"]) == 0
    assert "\n  casts " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fp8-recipe blockwise --hidden-size 72", "expected multiples of 16"),
        ("--fp8-recipe blockwise --num-layers 2", "covers no layer"),
        ("--fp8-recipe blockwise --transformer-impl transformer_engine", "expected local"),
        ("--fp8-recipe blockwise --fp8-param-gather", "expected bf16, fp8_recipe delayed or tensorwise"),
        ("--fp8-param-gather --use-distributed-optimizer", "fp8_param_gather with fp8_recipe None"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(flags: str, says: str) -> None:
    found = fp8_layer_problems(load_config([*SMALL, *flags.split()]))
    assert any(says in problem for problem in found), found


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fp8-recipe blockwize", "expected one of delayed, tensorwise"),
        ("--fp8-recipe blockwise --fp16", "expected bf16 with it"),
        ("--fp8-recipe blockwise --fp8-amax-history-len 16", "expected fp8_recipe delayed"),
        ("--fp8-recipe blockwise --tp-only-amax-red", "tp_only_amax_red with fp8_recipe blockwise"),
        ("--tp-only-amax-red", "tp_only_amax_red without fp8_recipe"),
        ("--fp8-recipe mxfp8 --fp8-format hybrid", "expected a recipe with a scale per tensor"),
        ("--fp8-recipe mxfp8 --fp8-demote-snr 10", "expected fp8_telemetry_interval"),
        ("--fp8-recipe mxfp8 --num-layers-at-start-in-bf16 -1", "expected a whole number, at least 0"),
    ],
)
def test_conflicting_options_say_what_to_change(flags: str, says: str) -> None:
    from mt_megatron.training.validate import validate

    with pytest.raises(ConfigError, match=says) as raised:
        validate(load_config([*SMALL, "--mock-data", *flags.split()]), world_size=1)
    assert "---" not in str(raised.value)

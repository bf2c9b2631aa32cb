"""What a whole run says and keeps: speed, records over a resume, a full disk, failures, agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.data.prepare.ngram import Baselines
from mt_megatron.training.evaluate import Validation
from mt_megatron.training.logging.summary import summary_lines
from tests.launch import run_ranks
from tests.training.logging.output_cases import TENSORBOARD

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Path]:
    folder = tmp_path_factory.mktemp("output")
    return run_ranks(2, "tests.training.logging.output_cases:runs", str(folder), timeout=200), folder


def test_a_resumed_run_appends_and_its_reader_can_tell(found: tuple[list[Found], Path]) -> None:
    ranks, folder = found
    assert ranks[0]["first"]["error"] is None and ranks[0]["second"]["error"] is None
    records = ranks[0]["records"]
    starts = [record for record in records if record["event"] == "start"]
    assert [record["iteration"] for record in starts] == [0, 3]
    assert starts[0]["resumed_from"] is None
    assert starts[1]["resumed_from"].endswith("iter_0000003")
    assert starts[0]["run_id"] != starts[1]["run_id"]
    assert [r["iteration"] for r in records if r["event"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_every_figure_is_there_and_plausible(found: tuple[list[Found], Path]) -> None:
    records = found[0][0]["records"]
    start = records[0]
    assert start["peak_flops"] == 5e11 and start["peak_source"] == "--peak-tflops"
    for record in (each for each in records if each["event"] == "train"):
        flops = start["flops_per_token"] * record["tokens_per_second"] / 2
        assert record["flops_per_second_per_device"] == pytest.approx(flops), "every token counts here"
        assert record["mfu"] == pytest.approx(flops / 5e11)
        assert 0 < record["communication_share"] < 1
        assert record["memory_bytes"] < record["device_memory_total"]
        assert record["eta_seconds"] == pytest.approx((6 - record["iteration"]) * record["step_seconds"])
        assert record["utilization"] is None or 0 <= record["utilization"] <= 100
    (end,) = [record for record in records if record["event"] == "end"][1:]
    assert end["finished"] and end["skipped_iterations"] == 0 and end["consumed_tokens"] == 6 * 8 * 32


def test_the_end_says_where_everything_is(found: tuple[list[Found], Path]) -> None:
    ranks, folder = found
    lines = ranks[0]["second"]["lines"]
    for line in (
        f"checkpoint: {folder}/run/iter_0000006",
        f"metrics: {folder}/run/metrics.jsonl",
        *([f"TensorBoard: {folder}/tb"] if TENSORBOARD else []),
        f"picture: {folder}/run/metrics.svg",
    ):
        assert line in lines
        assert Path(line.split(": ", 1)[1]).exists()
    assert any(line.startswith("done: 6 of 6 steps, 1,536 tokens, 0 skipped, ") for line in lines)
    assert any(line.startswith("training loss of the last step ") for line in lines)
    assert any(line.startswith("step 6/6  loss ") and "  MFU " in line for line in lines)
    assert ranks[1]["second"]["lines"] == [], "only rank 0 speaks"


def test_tensorboard_has_both_parts_of_the_run(found: tuple[list[Found], Path]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(found[1] / "tb"))
    events.Reload()
    recorded = {r["iteration"]: r["loss"] for r in found[0][0]["records"] if r["event"] == "train"}
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(recorded)


def test_a_full_disk_is_one_loud_line_and_training_goes_on(found: tuple[list[Found], Path]) -> None:
    full = found[0][0]["full"]
    assert full["error"] is None
    warnings = [line for line in full["lines"] if line.startswith("WARNING")]
    assert len(warnings) == 1 and "metrics" in warnings[0] and "No space left on device" in warnings[0]
    assert any(line.startswith("done: 3 of 3 steps") for line in full["lines"])


def test_a_run_that_fails_leaves_its_records_and_its_picture(found: tuple[list[Found], Path]) -> None:
    ranks, folder = found
    assert all("the third step failed" in rank["broken"]["error"] for rank in ranks)
    assert f"picture: {folder}/broken/metrics.svg" in ranks[0]["broken"]["lines"]
    assert ">loss, nats per token<" in (folder / "broken" / "metrics.svg").read_text()


def test_no_rank_waits_for_one_that_cannot_write(found: tuple[list[Found], Path]) -> None:
    for rank in found[0]:
        assert "ConfigError" in rank["unopened"]["error"]
        assert "change --metrics-path" in rank["unopened"]["error"]


def test_a_long_interval_is_not_silent(found: tuple[list[Found], Path]) -> None:
    """Without a record of its own; rank 1 says nothing, and neither does a CPU without a peak about it."""
    lines = found[0][0]["paced"]["lines"]
    assert _steps(lines) == ["step 1/6", "step 2/6", "step 5/6", "step 6/6"]
    assert not any("MFU" in line for line in lines)
    assert _steps(found[0][0]["left"]["lines"]) == ["step 1/6", "step 2/6"], "the last one is said once"
    assert found[0][1]["paced"]["lines"] == []


def _steps(lines: list[str]) -> list[str]:
    steps = [line.split("  ")[0] for line in lines if line.startswith("step ") and "loss" in line]
    return [step for step in steps if "/6" in step]


def test_a_run_beyond_its_steps_has_nothing_to_train() -> None:
    progress = Progress(iteration=310)
    arguments: dict[str, Any] = dict.fromkeys(("train_loss", "validation", "baselines", "checkpoint", "save"))
    beyond = summary_lines(progress=progress, train_iters=20, seconds=1.0, **arguments)
    assert beyond[0] == "nothing to train: the run is at step 310, beyond --train-iters 20"
    done = summary_lines(progress=progress, train_iters=310, seconds=1.0, **arguments)
    assert done[0].startswith("done:") and "checkpoint: none (no --save)" in done
    arguments["save"] = "runs/full disk"
    failed = summary_lines(progress=progress, train_iters=310, seconds=1.0, **arguments)
    assert "checkpoint: none (no save in runs/full disk succeeded, see above)" in failed


def test_the_last_lines_say_what_can_be_done_next(found: tuple[list[Found], Path]) -> None:
    ranks, folder = found
    first, second = (ranks[0][name]["lines"] for name in ("first", "second"))
    assert "next: the same command goes on from step 3" in first
    assert "next: the same command with a larger --train-iters trains on" in second
    export = f"next: mt-megatron convert --from-megatron {folder}/run --to-hf FOLDER"
    assert any(line.startswith(export) for line in first) and any(line.startswith(export) for line in second)
    assert not any(line.startswith("next: ") for line in ranks[0]["paced"]["lines"]), "nothing was kept"


def test_a_model_worse_than_pairs_of_tokens_is_told_to_train_longer() -> None:
    baselines = Baselines(unigram=6.0, bigram=4.0, tokens=10)
    told = {}
    for loss in (3.5, 4.5):
        lines = summary_lines(
            progress=Progress(iteration=3),
            train_iters=3,
            train_loss=loss,
            validation=Validation(loss=loss, tokens=10),
            baselines=baselines,
            checkpoint=None,
            save=None,
            seconds=1.0,
        )
        told[loss] = any("worse than a table of token pairs, train longer" in line for line in lines)
    assert told == {3.5: False, 4.5: True}

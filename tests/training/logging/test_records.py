"""Places that keep records: each can fail, none ends a run, and what they wrote can be read back."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.training.logging.metrics import Metrics, Records, metrics_path, read_records
from mt_megatron.training.logging.picture import Curve, draw, read_curve, write_picture
from mt_megatron.training.logging.tensorboard import TensorBoard
from mt_megatron.training.logging.wandb import chosen_mode


class Flaky:
    title = "flaky"

    def __init__(self, broken: set[int]) -> None:
        self.broken, self.kept, self.closed = broken, [], False

    def record(self, event: str, iteration: int, values: Mapping[str, Any]) -> None:
        if iteration in self.broken:
            raise OSError(28, "No space left on device")
        self.kept.append(iteration)

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("the last upload failed")


def test_a_sink_that_fails_is_loud_once_and_asked_again() -> None:
    said: list[str] = []
    flaky, sound = Flaky({2, 3}), Flaky(set())
    records = Records([flaky, sound], said.append)
    for iteration in range(1, 6):
        records.record("train", iteration, {})
    assert flaky.kept == [1, 4, 5] and sound.kept == [1, 2, 3, 4, 5]
    assert said == [
        "WARNING: flaky: the 'train' record of step 2 could not be written "
        "(OSError: [Errno 28] No space left on device); training goes on",
        "flaky: written again; 2 records missing",
    ]
    records.close()
    assert flaky.closed and sound.closed and "the last upload failed" in said[2]


def test_a_full_disk_tears_one_line_and_later_records_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = Metrics(path)
    metrics.record("train", 1, {"loss": 1.0})
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        with pytest.raises(OSError):
            metrics.record("train", 2, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert path.stat().st_size == size + 20, "the file was full in the middle of the record"
    metrics.record("train", 3, {"loss": 3.0})
    metrics.close()
    assert [record["iteration"] for record in read_records(path)] == [1, 3]


def test_a_torn_end_of_an_earlier_run_does_not_spoil_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "train", "iteration": 1}\n{"event": "tra')
    metrics = Metrics(path)
    metrics.record("start", 1, {})
    metrics.close()
    assert [record["event"] for record in read_records(path)] == ["train", "start"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", None),
        ("--save runs/a", "runs/a/metrics.jsonl"),
        ("--save runs/a --metrics-path b/m.jsonl", "b/m.jsonl"),
        ("--metrics-path m.jsonl", "m.jsonl"),
    ],
)
def test_records_lie_beside_the_checkpoints_unless_told_otherwise(flags: str, expected: str | None) -> None:
    found = metrics_path(load_config(["--model", "llama3_tiny", *flags.split()]))
    assert found == (None if expected is None else Path(expected))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_every_number_also_before_it_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path / "tb", config_yaml="train:\n  seed: 1\n")
    board.record("start", 0, {"parameters": 5})
    board.record("train", 10, {"loss": 2.5, "mfu": None, "name": "x"})
    board.record("valid", 10, {"loss": 2.0})
    found = scalars(tmp_path / "tb")
    assert found == {"train/loss": [(10, 2.5)], "valid/loss": [(10, 2.0)]}
    board.close()


def test_a_resumed_run_replaces_what_an_earlier_one_wrote_beyond_its_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = TensorBoard(tmp_path, config_yaml="")
    for step in (10, 20, 30):
        first.record("train", step, {"loss": float(step)})
    first.close()
    os.rename(next(tmp_path.glob("events*")), tmp_path / "events.out.tfevents.1.a.1.0")
    second = TensorBoard(tmp_path, config_yaml="")
    second.record("start", 20, {})
    second.record("train", 30, {"loss": -30.0})
    second.close()
    assert scalars(tmp_path)["train/loss"] == [(10, 10.0), (20, 20.0), (30, -30.0)]


def test_a_folder_that_tensorboard_cannot_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tensorboard-dir"):
        TensorBoard(tmp_path / "file" / "tb", config_yaml="")


@pytest.mark.parametrize(
    ("environment", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, None),
        ({"WANDB_MODE": "disabled"}, None),
    ],
)
def test_wandb_stays_offline_unless_somebody_said_otherwise(
    environment: dict[str, str], mode: str | None, tmp_path: Path
) -> None:
    assert chosen_mode({"HOME": str(tmp_path), **environment})[0] == mode


def test_a_key_in_netrc_means_online(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert chosen_mode({"HOME": str(tmp_path)})[0] == "online"


WANDB = """
import sys
from mt_megatron.config.parse import load_config
from mt_megatron.training.logging.wandb import WeightsAndBiases
config = load_config(["--model", "llama3_tiny", "--wandb-project", "p", "--wandb-exp-name", "n",
                      "--wandb-save-dir", sys.argv[1]])
run = WeightsAndBiases(config)
run.record("train", 10, {"loss": 2.5, "mfu": None})
run.record("valid", 10, {"loss": float("nan"), "tokens": 7})
run.record("end", 10, {"train_loss": 2.25})
run.close()
"""


def test_wandb_offline_writes_a_run_that_can_be_read(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    (file,) = tmp_path.rglob("*.wandb")
    history, summary, config = wandb_file(file)
    assert history == [
        {"iteration": 10, "train/loss": 2.5},
        {"iteration": 10, "valid/tokens": 7},
    ], "what is no number is left out"
    assert summary["train_loss"] == 2.25
    assert config["model"]["preset"] == "llama3_tiny"


def log_records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format after a header of 7 bytes: blocks of 32 KiB; a checksum of 4 bytes, a length
    of 2 and a kind of 1 (whole, first, middle, last) before each piece."""
    at, pieces = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        pieces += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def wandb_file(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """History, summary and configuration in a transaction log of wandb."""
    from wandb.proto import wandb_internal_pb2

    history, summary, config = [], {}, {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            history.append({name: value for name, value in found.items() if not name.startswith("_")})
        elif kind == "summary":
            summary |= {
                "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update
            }
        elif kind in ("run", "config"):
            source = record.run.config if kind == "run" else record.config
            config |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in source.update}
    return history, summary, config


def lines(*records: dict[str, Any]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def train_record(step: int, loss: float | None) -> dict[str, Any]:
    return {"event": "train", "iteration": step, "loss": loss, "consumed_tokens": step * 10}


def test_the_picture_is_of_the_last_history_and_survives_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        lines({"event": "start", "iteration": 0}, *(train_record(step, 9.0) for step in (1, 2, 3)))
        + '{"event": "tr\n'
        + lines({"event": "start", "iteration": 2}, train_record(3, 5.0), train_record(4, None))
    )
    assert read_curve(path).train == [(10, 9.0), (20, 9.0), (30, 5.0)]
    ramp = [{**train_record(step, 9.0), "consumed_tokens": step**2} for step in (2, 4, 6)]
    valid = [{"event": "valid", "iteration": step, "loss": 8.0} for step in (1, 4, 5, 9)]
    path.write_text(lines({"event": "start", "iteration": 0}, *ramp, *valid))
    assert read_curve(path).valid == [(2.0, 8.0), (16.0, 8.0), (26.0, 8.0), (54.0, 8.0)]
    write_picture(path, tmp_path / "new" / "m.svg")
    assert "</svg>" in (tmp_path / "new" / "m.svg").read_text()


def test_a_long_run_is_drawn_with_few_points_and_hides_no_spike() -> None:
    points = [(float(i), 3.0 + (90.0 if i == 123_456 else 0.0)) for i in range(1, 200_001)]
    picture = draw(Curve(train=points, valid=[(150_000.0, 3.1)], unigram=None, bigram=None))
    assert len(picture) < 60_000
    assert "fill-opacity" in picture and ">100<" in picture, "the axis reaches the spike"


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [0.0, 0.0], [2.001, 2.0004], [1e-9, 1e3]])
def test_any_losses_can_be_drawn(losses: list[float]) -> None:
    points = [(float(i + 1), loss) for i, loss in enumerate(losses)]
    picture = draw(Curve(train=points, valid=points, unigram=2.0, bigram=2.0))
    assert "nan" not in picture and "inf" not in picture


def test_the_picture_has_a_title_and_panels_of_what_is_known(tmp_path: Path) -> None:
    points = [(1000.0, 5.0), (2000.0, 4.0)]
    curve = Curve(
        train=points,
        valid=[],
        unigram=None,
        bigram=None,
        lr=[(1000.0, 2e-5), (2000.0, 1e-5)],
        speed=[(1000.0, 12_000.0), (2000.0, float("nan"))],
    )
    picture = draw(curve, "llama3_tiny \u00b7 a <run>")
    ElementTree.fromstring(picture)
    assert ">llama3_tiny \u00b7 a &lt;run&gt;<" in picture
    for words in ("loss, nats per token", "learning rate", "2e-5", "tokens per second", "10k", "15k"):
        assert f">{words}<" in picture
    assert picture.count('r="2.5"') == 2 + 2 + 1, "few points are marked"
    bare = draw(Curve(train=points, valid=[], unigram=None, bigram=None))
    assert "learning rate" not in bare and "tokens per second" not in bare
    many = [(float(at), 4.0) for at in range(1, 100)]
    assert 'r="2.5"' not in draw(Curve(train=many, valid=[], unigram=None, bigram=None))


def test_the_folder_is_the_title_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "my-run" / "m.jsonl"
    path.parent.mkdir()
    path.write_text(lines(train_record(3, 4.0)))
    write_picture(path, tmp_path / "m.svg")
    assert ">my-run<" in (tmp_path / "m.svg").read_text()

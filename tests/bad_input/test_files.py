"""Data files that are damaged in one place, or do not fit the run, are named before it starts."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.data.prepare.indexed_files import write_index
from mt_megatron.training.validate import problems
from tests.second_lane import DAILY

SOAK = "MT_MEGATRON_SOAK" in os.environ
SEEDED = st.integers(0, 2**32 - 1).map(Random)
VOCABULARY = 300
HEADER = 34

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 300 --seq-length 32 "
    "--position-embedding-type rope --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer"
)


def write_data(prefix: Path, rng: Random, *, largest: int = VOCABULARY, sequences: int | None = None) -> None:
    """A pair of files that Megatron reads."""
    count = rng.randrange(2, 9) if sequences is None else sequences
    lengths = [rng.randrange(20, 90) for _ in range(count)]
    tokens = np.random.default_rng(rng.randrange(2**32)).integers(0, largest, sum(lengths))
    tokens.astype(np.uint16).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), np.dtype(np.uint16), lambda: [np.array(lengths, np.int32)])


def found(prefix: Path, *flags: str) -> list[str]:
    config = load_config([*FLAGS.split(), "--train-data-path", str(prefix), *flags])
    return problems(config, world_size=1)


Damage = Callable[[Path, Path, Random], None]
DAMAGES: dict[str, Damage] = {}


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


@damage
def tokens_cut_off(bin_: Path, idx: Path, rng: Random) -> None:
    bin_.write_bytes(bin_.read_bytes()[: rng.randrange(bin_.stat().st_size)])


@damage
def tokens_added(bin_: Path, idx: Path, rng: Random) -> None:
    bin_.write_bytes(bin_.read_bytes() + bytes(rng.randrange(1, 99)))


@damage
def index_cut_off(bin_: Path, idx: Path, rng: Random) -> None:
    idx.write_bytes(idx.read_bytes()[: rng.randrange(idx.stat().st_size)])


@damage
def index_of_another_file(bin_: Path, idx: Path, rng: Random) -> None:
    write_data(bin_.with_name("other"), rng, sequences=20)
    shutil.move(bin_.with_name("other.idx"), idx)


@damage
def foreign_magic(bin_: Path, idx: Path, rng: Random) -> None:
    idx.write_bytes(rng.choice([b"TNTIDX\x00\x00", b"PK\x03\x04....", b"\x00" * 9]) + idx.read_bytes()[9:])


@damage
def later_version(bin_: Path, idx: Path, rng: Random) -> None:
    content = bytearray(idx.read_bytes())
    content[9:17] = struct.pack("<Q", rng.choice([0, 2, 2**60]))
    idx.write_bytes(content)


@damage
def unknown_dtype(bin_: Path, idx: Path, rng: Random) -> None:
    content = bytearray(idx.read_bytes())
    content[17] = rng.choice([0, 9, 255])
    idx.write_bytes(content)


@damage
def wider_dtype(bin_: Path, idx: Path, rng: Random) -> None:
    content = bytearray(idx.read_bytes())
    content[17] = rng.choice([4, 5, 7])
    idx.write_bytes(content)


@damage
def another_count(bin_: Path, idx: Path, rng: Random) -> None:
    content = bytearray(idx.read_bytes())
    at = rng.choice([18, 26])
    content[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 1000, 2**40, 2**64 - 1]))
    idx.write_bytes(content)


@damage
def no_sequences(bin_: Path, idx: Path, rng: Random) -> None:
    bin_.write_bytes(b"")
    write_index(idx, np.dtype(np.uint16), lambda: [np.array([], np.int32)])


@damage
def empty_index(bin_: Path, idx: Path, rng: Random) -> None:
    idx.write_bytes(b"")


@damage
def text_instead(bin_: Path, idx: Path, rng: Random) -> None:
    idx.write_text("documents: 12\n" * rng.randrange(1, 50))


@damage
def folder_instead(bin_: Path, idx: Path, rng: Random) -> None:
    which = rng.choice([bin_, idx])
    which.unlink()
    which.mkdir()


@damage
def one_is_missing(bin_: Path, idx: Path, rng: Random) -> None:
    rng.choice([bin_, idx]).unlink()


@damage
def link_to_nowhere(bin_: Path, idx: Path, rng: Random) -> None:
    bin_.unlink()
    bin_.symlink_to("nowhere")


@damage
def token_beyond_the_vocabulary(bin_: Path, idx: Path, rng: Random) -> None:
    tokens = np.fromfile(bin_, np.uint16)
    tokens[rng.randrange(len(tokens))] = rng.choice([VOCABULARY, 65_000])
    tokens.tofile(bin_)


@damage
def sidecar_of_another_tokenizer(bin_: Path, idx: Path, rng: Random) -> None:
    made = {"digest": "0" * 64, "vocab_size": VOCABULARY + 1, "type": "HuggingFaceTokenizer"}
    bin_.with_suffix(".json").write_text(json.dumps({"format": 1, "tokenizer": made}))


@damage
def sidecar_that_is_none(bin_: Path, idx: Path, rng: Random) -> None:
    bin_.with_suffix(".json").write_text(rng.choice(["", "{", "[]", '{"format": 99}', '{"format": 1}']))


def pair(folder: Path, rng: Random) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_data(folder / "data", rng)
    return folder / "data"


@pytest.mark.parametrize("name", DAMAGES)
@settings(
    max_examples=300 if SOAK else 6 if DAILY else 4,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(rng=SEEDED)
def test_damaged_data_is_named(name: str, rng: Random, tmp_path: Path) -> None:
    prefix = pair(tmp_path / "case", rng)
    assert found(prefix) == [], "sound before it was damaged"
    DAMAGES[name](Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), rng)
    text = "\n".join(found(prefix))
    assert str(prefix) in text, text
    assert any(
        way in text for way in ("Make the data", "make the data", "Name that", "raise --", "correct --")
    )
    assert any(word in text for word in ("expected", "expects", "has only", "damaged")), text


@settings(
    max_examples=2000 if SOAK else 60 if DAILY else 30,
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(rng=SEEDED)
def test_any_bytes_in_the_header_are_an_answer_and_never_a_crash(rng: Random, tmp_path: Path) -> None:
    prefix = pair(tmp_path / "case", rng)
    idx = Path(f"{prefix}.idx")
    content = bytearray(idx.read_bytes())
    for _ in range(rng.randrange(1, 5)):
        content[rng.randrange(min(len(content), HEADER + 20))] = rng.randrange(256)
    idx.write_bytes(content)
    for line in found(prefix):
        assert str(prefix) in line


def test_too_little_to_validate_on(tmp_path: Path) -> None:
    rng = Random(1)
    write_data(tmp_path / "train", rng)
    tokens = np.zeros(32, np.uint16)
    tokens.tofile(tmp_path / "valid.bin")
    write_index(tmp_path / "valid.idx", np.dtype(np.uint16), lambda: [np.array([32], np.int32)])
    (line,) = found(tmp_path / "train", "--valid-data-path", str(tmp_path / "valid"))
    assert "holds 32 tokens; expected at least seq_length + 1 = 33" in line and "--seq-length" in line
    assert found(tmp_path / "train", "--test-data-path", str(tmp_path / "valid")) == []


def tokenizer_file(path: Path, size: int) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(size - 1)} | {"<|endoftext|>": size - 1}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(path))


def with_tokenizer(tmp_path: Path, content: str | int, *flags: str) -> list[str]:
    path = tmp_path / "tokenizer.json"
    if isinstance(content, int):
        tokenizer_file(path, content)
    else:
        path.write_text(content)
    argv = [
        *FLAGS.split(),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(path),
        *flags,
    ]
    return problems(load_config(argv), world_size=1)


def test_a_tokenizer_that_fits_is_fine(tmp_path: Path) -> None:
    write_data(tmp_path / "data", Random(1))
    assert with_tokenizer(tmp_path, 300, "--train-data-path", str(tmp_path / "data")) == []
    assert with_tokenizer(tmp_path, 4200, "--mock-data", "--vocab-size", "none") == []


@pytest.mark.parametrize("content", ["", "{}", "not JSON", "[1, 2]", '{"model": {"type": "none"}}'])
@pytest.mark.parametrize("source", ["data", "mock"])
def test_a_tokenizer_that_is_none(tmp_path: Path, content: str, source: str) -> None:
    write_data(tmp_path / "data", Random(1))
    flags = ["--mock-data", "--vocab-size", "5000"]
    if source == "data":
        flags = ["--train-data-path", str(tmp_path / "data")]
    (line,) = with_tokenizer(tmp_path, content, *flags)
    assert "tokenizer.json is not a tokenizer.json" in line


def test_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    write_data(tmp_path / "data", Random(1))
    (line,) = with_tokenizer(tmp_path, 301, "--train-data-path", str(tmp_path / "data"))
    assert "vocab_size=300" in line and "301 tokens" in line and "--vocab-size" in line


def test_a_tokenizer_smaller_than_the_data(tmp_path: Path) -> None:
    write_data(tmp_path / "data", Random(1), largest=300)
    flags = ["--train-data-path", str(tmp_path / "data"), "--vocab-size", "none"]
    (line,) = with_tokenizer(tmp_path, 100, *flags)
    assert "has only 100 tokens" in line and "--tokenizer-model" in line


def test_a_tokenizer_too_small_for_generated_samples(tmp_path: Path) -> None:
    (line,) = with_tokenizer(tmp_path, 300, "--mock-data", "--vocab-size", "none")
    assert "300 tokens" in line and "at least 4095" in line and "--vocab-size" in line

"""Megatron's datasets over prepared files: right tokens, exact order, an index that follows the data."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import DataConfig
from mt_megatron.data.loader import datasets
from mt_megatron.data.loader.datasets import build_datasets, has_order, order_fingerprint, unused_test_data
from mt_megatron.data.loader.tokenizer import NullTokenizer
from mt_megatron.errors import DataError
from mt_megatron.training import loop
from tests.launch import run_ranks

VOCABULARY = 64
EOD = VOCABULARY - 1
LENGTH = 16


def write_indexed(
    prefix: Path, documents: int, seed: int = 0, vocabulary: int = VOCABULARY
) -> list[list[int]]:
    """An indexed dataset of random documents, each with its end; returns them."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    made = []
    for _ in range(documents):
        ids = [*rng.integers(0, vocabulary - 1, size=rng.integers(1, 60)).tolist(), vocabulary - 1]
        builder.add_document(np.array(ids, dtype=np.uint16), [len(ids)])
        made.append(ids)
    builder.finalize(f"{prefix}.idx")
    return made


def _build(data: DataConfig, cache: Path, **options: Any):
    options = {"train_samples": 20, "sequence_length": LENGTH, "seed": 7, **options}
    return build_datasets(data, tokenizer=NullTokenizer(VOCABULARY), cache_dir=cache, **options)


@pytest.fixture
def prepared(tmp_path: Path) -> DataConfig:
    write_indexed(tmp_path / "train", 40)
    write_indexed(tmp_path / "valid", 12, seed=1)
    return DataConfig(train_data_path=(str(tmp_path / "train"),), valid_data_path=(str(tmp_path / "valid"),))


def test_samples_are_cut_out_of_the_documents_and_labels_are_the_next_tokens(
    prepared: DataConfig, tmp_path: Path
) -> None:
    _, valid, test = _build(prepared, tmp_path / "cache")
    assert test is None
    documents = write_indexed(tmp_path / "again", 12, seed=1)
    stream = [t for i in np.asarray(valid.document_index) for t in documents[i]]
    assert sorted(valid.document_index) == list(range(12))
    expected = Counter()
    for start in range(0, len(stream) - LENGTH, LENGTH):
        expected[tuple(stream[start : start + LENGTH + 1])] += 1
    found = Counter()
    for i in range(len(valid)):
        sample = valid[i]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
        assert torch.equal(sample["position_ids"], torch.arange(LENGTH))
        assert sample["loss_mask"].tolist() == [1.0] * LENGTH
        assert "attention_mask" not in sample
        found[(*sample["tokens"].tolist(), int(sample["labels"][-1]))] += 1
    assert found == expected


def test_order_repeats_for_a_seed_and_differs_for_another(prepared: DataConfig, tmp_path: Path) -> None:
    orders = [
        order_fingerprint(_build(prepared, tmp_path / cache, seed=seed).train)
        for cache, seed in (("a", 7), ("b", 7), ("c", 8))
    ]
    assert orders[0] == orders[1] != orders[2]


def test_order_is_kept_when_more_samples_of_the_same_epoch_are_asked_for(
    prepared: DataConfig, tmp_path: Path
) -> None:
    few = _build(prepared, tmp_path / "cache", train_samples=5).train
    more = _build(prepared, tmp_path / "cache", train_samples=20).train
    assert order_fingerprint(few) == order_fingerprint(more)
    several_epochs = _build(prepared, tmp_path / "cache", train_samples=len(more) * 3).train
    assert len(several_epochs) >= len(more) * 3
    assert order_fingerprint(several_epochs) != order_fingerprint(more)


def test_the_order_of_a_blend_is_that_of_its_parts_and_weights(prepared: DataConfig, tmp_path: Path) -> None:
    parts = [_build(prepared, tmp_path / "cache", seed=seed).train for seed in (1, 2)]

    def blend(samples: int, weights: list[float], parts: list[Any]) -> Any:
        index = np.arange(samples) % 2
        return SimpleNamespace(
            datasets=parts, weights=weights, dataset_index=index, dataset_sample_index=index
        )

    few, more = blend(10, [0.5, 0.5], parts), blend(20, [0.5, 0.5], parts)
    assert order_fingerprint(few) == order_fingerprint(more)
    for other in (blend(10, [0.4, 0.6], parts), blend(10, [0.5, 0.5], parts[::-1])):
        assert order_fingerprint(other) != order_fingerprint(few)
        assert not has_order(other, order_fingerprint(few))
    assert has_order(more, order_fingerprint(few)) and not has_order(few, None)
    # What an earlier version wrote: the indices of the blend itself as well.
    digest = hashlib.sha256()
    for part in (few, *parts):
        for name in (
            "document_index",
            "sample_index",
            "shuffle_index",
            "dataset_index",
            "dataset_sample_index",
        ):
            if hasattr(part, name):
                digest.update(name.encode() + np.ascontiguousarray(getattr(part, name)).tobytes())
    assert has_order(few, digest.hexdigest()) and not has_order(more, digest.hexdigest())


def _run(data: DataConfig, eval_iters: int, seq_length: int = LENGTH) -> Any:
    """The part of a run that its datasets depend on."""
    return SimpleNamespace(
        config=replace(load_config(["--eval-iters", str(eval_iters)]), data=data),
        tokenizer=NullTokenizer(VOCABULARY),
        shape=SimpleNamespace(seq_length=seq_length),
        batch_sizes=SimpleNamespace(samples_after=lambda steps: 4 * steps),
        train_iters=5,
        global_batch_size=4,
    )


@pytest.mark.parametrize(
    ("paths", "eval_iters", "samples"),
    [
        ({"train_data_path": ("a",), "valid_data_path": ("b",)}, 2, (None, 0)),
        ({"train_data_path": ("a",), "valid_data_path": ("b",)}, 0, (0, 0)),
        ({"train_data_path": ("a",), "test_data_path": ("1", "a", "1", "b")}, 2, (None, 0)),
        ({"train_data_path": ("a",), "valid_data_path": ("1", "a", "1", "b")}, 2, (8, 0)),
        ({"data_path": ("1", "a", "1", "b"), "split": "8,1,1"}, 2, (8, 0)),
        ({"data_path": ("a",), "split": "8,1,1"}, 2, (None, 0)),
    ],
)
def test_a_run_asks_for_as_many_held_out_samples_as_it_needs(
    paths: dict[str, Any], eval_iters: int, samples: tuple[int | None, int], monkeypatch: Any
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(loop, "build_datasets", lambda data, **options: asked.update(options))
    loop._Run._datasets(_run(DataConfig(**paths), eval_iters))
    assert (asked["valid_samples"], asked["test_samples"]) == samples


def test_a_third_share_too_small_for_a_sample_ends_no_run(prepared: DataConfig) -> None:
    data = DataConfig(data_path=prepared.train_data_path, split="80,18,2")
    # No document has 65 tokens, and the third share is one of them.
    train, valid, test = loop._Run._datasets(_run(data, eval_iters=2, seq_length=64))
    assert len(train) >= 20 and valid is not None and test is None


def test_data_prepared_anew_under_the_same_path_gets_a_new_index(
    prepared: DataConfig, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    long = _build(prepared, cache).train
    count = len(long)
    write_indexed(tmp_path / "train", 10, seed=2)
    short = _build(prepared, cache).train
    assert max(short.document_index) < 10
    assert len(short) != count
    for i in range(len(short)):
        short[i]


def test_the_cache_is_reused_and_lies_where_it_was_asked_for(prepared: DataConfig, tmp_path: Path) -> None:
    first = _build(prepared, tmp_path / "cache").train
    again = _build(prepared, tmp_path / "cache").train
    assert first.built_anew_on_cache_miss and not again.built_anew_on_cache_miss
    assert order_fingerprint(first) == order_fingerprint(again)
    assert not list(tmp_path.glob("train/cache*"))
    elsewhere = DataConfig(
        train_data_path=prepared.train_data_path, data_cache_path=str(tmp_path / "elsewhere")
    )
    _build(elsewhere, tmp_path / "unused")
    assert list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "unused").exists()


def test_one_path_is_divided_by_split(prepared: DataConfig, tmp_path: Path) -> None:
    data = DataConfig(data_path=prepared.train_data_path, split="70,20,10")
    train, valid, test = _build(data, tmp_path / "cache")
    parts = [set(np.asarray(d.document_index).tolist()) for d in (train, valid, test)]
    assert parts == [set(range(28)), set(range(28, 36)), set(range(36, 40))]


def test_documents_can_be_kept_apart(prepared: DataConfig, tmp_path: Path) -> None:
    data = DataConfig(
        train_data_path=prepared.train_data_path,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        packed_sequences=False,
    )
    train = _build(data, tmp_path / "cache").train
    sample = next(train[i] for i in range(len(train)) if EOD in train[i]["tokens"][2:-2])
    end = sample["tokens"].tolist().index(EOD)
    assert sample["loss_mask"][end] == 0
    assert sample["position_ids"][end + 1] == 0
    mask = sample["attention_mask"]
    assert mask.shape == (1, LENGTH, LENGTH) and mask.dtype == torch.bool
    assert mask[0, end + 1, : end + 1].all() and not mask[0, end + 1, end + 1]


def test_generated_samples_need_no_files(tmp_path: Path) -> None:
    train = build_datasets(
        DataConfig(mock_data=True),
        tokenizer=NullTokenizer(8192),
        sequence_length=LENGTH,
        train_samples=4,
        valid_samples=4,
        test_samples=4,
        seed=1,
        cache_dir=tmp_path,
    ).train
    assert train[0]["tokens"].shape == (LENGTH,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(), "no training data"),
        (DataConfig(data_path=("x",)), "without split"),
        (DataConfig(data_path=("x",), train_data_path=("y",), split="1,1"), "one of the two"),
        (DataConfig(train_data_path=("x",), split="1,1"), "divides data_path only"),
        (DataConfig(train_data_path=("x",), valid_data_path=("1", "a", "2", "b")), "cannot be weighted"),
        (DataConfig(train_data_path=("nowhere/x",)), "prepare --output"),
    ],
)
def test_wrong_configurations_say_what_to_change(data: DataConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        _build(data, tmp_path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (DataConfig(train_data_path=("a",), test_data_path=("b",)), "--test-data-path: no evaluation"),
        (DataConfig(data_path=("a",), split="969,30,1"), "--split 969,30,1: no evaluation on the third"),
        (DataConfig(data_path=("a",), split="98,2,0"), None),
        (DataConfig(data_path=("a",), split="98,2"), None),
        (DataConfig(train_data_path=("a",), valid_data_path=("b",)), None),
        (DataConfig(mock_data=True), None),
    ],
)
def test_test_data_that_nothing_evaluates_is_said(data: DataConfig, says: str | None) -> None:
    found = unused_test_data(data)
    assert found is None if says is None else says in (found or "")


def test_damaged_files_and_another_tokenizers_data_are_named(prepared: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too few for one sample"):
        _build(prepared, tmp_path / "cache", sequence_length=100_000)
    prefix = tmp_path / "train"
    content = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match="one was cut off"):
        _build(prepared, tmp_path / "cache")
    Path(f"{prefix}.idx").write_bytes(b"not an index at all")
    with pytest.raises(DataError, match="not a Megatron index"):
        _build(prepared, tmp_path / "cache")
    os.remove(f"{prefix}.idx")
    with pytest.raises(DataError, match="none or only one"):
        _build(prepared, tmp_path / "cache")
    write_indexed(prefix, 40, vocabulary=VOCABULARY * 2)
    with pytest.raises(DataError, match="another one"):
        _build(prepared, tmp_path / "cache")


@pytest.mark.parametrize(
    ("paths", "split", "message"),
    [
        (("train",), "1,99", "the training share of the split 1,99 of .*train holds 0 tokens in 0 of its 40"),
        (
            ("0.9", "train", "0.1", "valid"),
            "98,1,1",
            "the validation share of the split 98,1,1 of .*valid holds 0 tokens in 0 of its 12",
        ),
        (
            ("valid", "train", "train"),
            "98,1,1",
            "the validation share of the split 98,1,1 of .*valid holds 0 tokens .* at least 17. Change",
        ),
    ],
)
def test_a_share_without_tokens_is_an_error_and_not_a_search_without_end(
    paths: tuple[str, ...], split: str, message: str, prepared: DataConfig, tmp_path: Path
) -> None:
    found = tuple(each if each[0] == "0" else str(tmp_path / each) for each in paths)
    with pytest.raises(DataError, match=message):
        _build(DataConfig(data_path=found, split=split), tmp_path / "cache", valid_samples=4, test_samples=4)


def test_a_role_without_samples_is_none(prepared: DataConfig, tmp_path: Path) -> None:
    data = DataConfig(data_path=prepared.train_data_path, split="98,1,1")
    train, valid, test = _build(data, tmp_path / "cache", valid_samples=0, test_samples=0)
    assert len(train) >= 20 and valid is None and test is None
    of_roles = DataConfig(
        train_data_path=prepared.train_data_path,
        valid_data_path=prepared.valid_data_path,
        test_data_path=("0.5", *prepared.train_data_path, "0.5", *prepared.valid_data_path),
    )
    train, valid, test = _build(of_roles, tmp_path / "cache", test_samples=0)
    assert len(train) >= 20 and valid is not None and test is None


def test_an_index_cache_that_cannot_be_written_is_named(prepared: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"index cache .* cannot be written: .* with --data-cache-path"):
        _build(prepared, tmp_path / "file" / "cache")
    generated = DataConfig(mock_data=True)
    with pytest.raises(DataError, match=r"index cache .* cannot be written: .* with --data-cache-path"):
        build_datasets(
            generated,
            tokenizer=NullTokenizer(8192),
            sequence_length=LENGTH,
            train_samples=4,
            seed=1,
            cache_dir=tmp_path / "file",
        )


def build_in_a_group(folder: str) -> dict[str, Any]:
    """One rank of the test below: a weighted blend and a plain validation set."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data = DataConfig(
        train_data_path=("0.7", f"{folder}/a", "0.3", f"{folder}/b"), valid_data_path=(f"{folder}/b",)
    )
    train, valid, _ = _build(data, Path(folder) / "cache", train_samples=40)
    anew = bool(train.built_anew_on_cache_miss)
    divided = DataConfig(data_path=("0.7", f"{folder}/a", "0.3", f"{folder}/b"), split="80,10,10")
    parts = _build(divided, Path(folder) / "cache", train_samples=40, valid_samples=8, test_samples=0)
    (Path(folder) / "file").touch()
    try:
        _build(data, Path(folder) / "file", train_samples=40)
        said = ""
    except DataError as error:
        said = str(error)
    result = {
        "parts": [None if part is None else len(part) for part in parts],
        "said": said,
        "train": order_fingerprint(train),
        "valid": order_fingerprint(valid),
        "anew": anew,
        "counts": np.bincount(np.asarray(train.dataset_index)[:40], minlength=2).tolist(),
        "first": train[0]["tokens"].tolist(),
    }
    dist.destroy_process_group()
    return result


def test_all_ranks_see_the_same_blend_and_only_rank_0_builds_it(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", 60)
    write_indexed(tmp_path / "b", 60, seed=3)
    first, second = run_ranks(2, "tests.data.test_datasets:build_in_a_group", str(tmp_path))
    assert (first["anew"], second["anew"]) == (True, False)
    assert first["counts"] == second["counts"] == [28, 12]
    for key in ("train", "valid", "first", "parts", "said"):
        assert first[key] == second[key]
    assert first["parts"][0] >= 40 and first["parts"][1] >= 8 and first["parts"][2] is None
    assert "cannot be written" in first["said"] and "--data-cache-path" in first["said"]


def fingerprints_of_copies(folder: str, other: str) -> tuple[str, str]:
    """The rank's side: of its own copy of the data in ``folder``, changed on rank 1 in the way ``other``."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    own = Path(folder) / f"rank{rank}"
    own.mkdir()
    for suffix in (".idx", ".bin"):
        path = own / f"data{suffix}"
        path.write_bytes(suffix.encode() * 40_000)
        if rank and other == "time":
            os.utime(path, (1, 1))
        elif rank:
            path.write_bytes(suffix.encode() * 39_999 + b"?" * 4)
    try:
        return datasets._files_fingerprint([str(own / "data")]), datasets._agreed_fingerprint(
            [str(own / "data")]
        )
    except DataError as error:
        return "", str(error)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("other", ["time", "content"])
def test_copies_on_the_nodes_disks_share_an_index(other: str, tmp_path: Path) -> None:
    (first, agreed), second = run_ranks(
        2, "tests.data.test_datasets:fingerprints_of_copies", str(tmp_path), other
    )
    assert agreed == first
    if other == "time":
        assert second[0] != second[1] == first, "rank 0's names the folder of the index"
    else:
        assert "are not those of rank 0" in second[1] and "rank1/data" in second[1]

"""Loading for training: exact positions over blends and epochs, workers that change nothing, borders."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import DataConfig
from mt_megatron.data.loader.batches import _ended_worker, train_batches
from mt_megatron.data.loader.datasets import build_datasets
from mt_megatron.data.loader.tokenizer import NullTokenizer
from mt_megatron.errors import DataError
from mt_megatron.layers.attention.packed_sequences import document_mask, document_positions
from mt_megatron.training.validate import problems
from tests.data.test_batches import Numbered
from tests.data.test_datasets import EOD, LENGTH, VOCABULARY, write_indexed
from tests.launch import RankError, run_ranks

HERE = "tests.data.test_loading:"


def batches_of(dataset: Any, consumed: int = 0, *, workers: int = 0, micro: int = 2) -> Any:
    return train_batches(
        dataset,
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=workers,
    )


def blend_of_several_epochs(folder: str) -> dict[str, Any]:
    """One rank of the test below."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    prefixes = [f"{folder}/a", f"{folder}/b"]
    for seed, prefix in enumerate(prefixes):
        write_indexed(Path(prefix), 12, seed=seed)
    data = DataConfig(
        train_data_path=("0.7", prefixes[0], "0.3", prefixes[1]),
        reset_attention_mask=True,
        reset_position_ids=True,
        eod_mask_loss=True,
    )
    train = build_datasets(
        data,
        tokenizer=NullTokenizer(VOCABULARY),
        sequence_length=LENGTH,
        train_samples=120,
        seed=3,
        cache_dir=Path(folder) / "cache",
    ).train
    parts = train.datasets
    epochs = [len(part.document_index) / 12 for part in parts]
    torch.manual_seed(11)
    before = torch.random.get_rng_state().clone()
    numpy_before = np.random.get_state()[1].copy()  # noqa: NPY002
    whole = [{k: v.tolist() for k, v in b.items()} for b in islice(batches_of(train), 60)]
    same = {}
    for workers in (0, 1, 3):
        for consumed in (34, 90):
            batches = batches_of(train, consumed, workers=workers)
            found = [{k: v.tolist() for k, v in b.items()} for b in islice(batches, 10)]
            same[f"{workers} workers from {consumed}"] = found == whole[consumed // 2 : consumed // 2 + 10]
            batches.close()
    shares = [int((np.asarray(train.dataset_index)[:120] == i).sum()) / 120 for i in range(2)]
    return {
        "epochs": epochs,
        "same": same,
        "shares": shares,
        "others differ": whole[0] != whole[1],
        "torch state kept": torch.equal(before, torch.random.get_rng_state()),
        "numpy state kept": bool((numpy_before == np.random.get_state()[1]).all()),  # noqa: NPY002
    }


def test_a_blend_of_several_epochs_continues_exactly_with_any_workers(tmp_path: Path) -> None:
    (found,) = run_ranks(1, HERE + "blend_of_several_epochs", str(tmp_path), timeout=240)
    assert all(found["same"].values()) and len(found["same"]) == 6, found["same"]
    assert found["epochs"][0] >= 3 and found["epochs"][1] >= 2
    assert found["shares"] == pytest.approx([0.7, 0.3], abs=0.01)
    assert found["others differ"] and found["torch state kept"] and found["numpy state kept"]


class Documents:
    """Random tokens with ends among them, and what GPTDataset carries of its configuration."""

    def __init__(self, seed: int, share: float, masks: bool = False) -> None:
        from types import SimpleNamespace

        generator = np.random.default_rng(seed)
        tokens = generator.integers(0, VOCABULARY - 1, (4, LENGTH + 1))
        tokens[generator.random(tokens.shape) < share] = EOD
        self.tokens = torch.from_numpy(tokens)
        self.config = SimpleNamespace(
            reset_attention_mask=True, create_attention_mask=masks, tokenizer=NullTokenizer(VOCABULARY)
        )

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

        tokens = self.tokens[index, :-1].contiguous()
        masks = self.config.create_attention_mask
        mask, counts, positions = _get_ltor_masks_and_position_ids(tokens, EOD, True, True, False, masks)
        sample = {
            "tokens": tokens,
            "labels": self.tokens[index, 1:],
            "loss_mask": counts,
            "position_ids": positions,
        }
        return {**sample, "attention_mask": mask} if masks else sample


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), micro=st.sampled_from([1, 2, 4])
)
def test_borders_say_what_megatrons_masks_say(seed: int, share: float, micro: int) -> None:
    packed, masked = Documents(seed, share), Documents(seed, share, masks=True)
    for one, other in zip(
        islice(batches_of(packed, micro=micro), 4 // micro),
        islice(batches_of(masked, micro=micro), 4 // micro),
        strict=True,
    ):
        assert "attention_mask" not in one and "cu_seqlens" not in other
        borders = one["cu_seqlens"]
        assert borders.dtype == torch.int32 and borders[-1] == micro * LENGTH
        assert int(one["max_seqlen"]) == max(borders.diff().tolist())
        assert torch.equal(document_mask(borders, micro, torch.device("cpu")), other["attention_mask"])
        assert torch.equal(document_positions(borders, micro), other["position_ids"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--packed-sequences", "without reset_attention_mask; expected both"),
        (
            "--packed-sequences --reset-attention-mask --context-parallel-size 2",
            "context_parallel_size 2; expected 1",
        ),
        ("--packed-sequences --reset-attention-mask", ""),
        ("--no-packed-sequences --reset-attention-mask --context-parallel-size 2", ""),
        ("--reset-attention-mask --context-parallel-size 2", ""),
    ],
)
def test_packing_is_refused_where_it_cannot_be(flags: str, message: str) -> None:
    base = "--model llama3_tiny --vocab-size 4096 --tokenizer-type NullTokenizer --mock-data --train-iters 9"
    found = "\n".join(problems(load_config([*base.split(), "--lr", "1e-3", *flags.split()]), world_size=2))
    assert message in found and bool(message) == bool(found)


class Fatal(Numbered):
    """Sample 20 ends the worker that loads it."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 20 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def fatal() -> None:
    """Load from a worker that is killed; the error goes to stderr."""
    for _ in batches_of(Fatal(64), workers=2):
        pass


def test_a_worker_that_dies_is_named() -> None:
    # In a process of its own, which has started no other loader.
    with pytest.raises(RankError, match=r"DataLoader worker \(pid \d+\) ended by signal 9"):
        run_ranks(1, "tests.data.test_loading:fatal")


def between_two_batches() -> dict[str, Any]:
    """A worker is killed while the main thread is in something else; the error comes with the data."""
    before = signal.getsignal(signal.SIGCHLD)
    batches = batches_of(Numbered(4096), workers=1)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(30)
    for _ in range(100):
        time.sleep(0.005)
    try:
        for _ in batches:
            pass
        said = ""
    except DataError as error:
        said = str(error)
    return {"said": said, "kept": signal.getsignal(signal.SIGCHLD) == before}


def test_a_worker_that_dies_does_not_interrupt_the_main_thread() -> None:
    (found,) = run_ranks(1, HERE + "between_two_batches")
    assert found["kept"]
    assert "ended by signal 9" in found["said"]


class Worker:
    """Stands for a worker that the loader still knows; one without an exit code runs on."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode, self.pid = exitcode, 4242
        self.sentinel, self.other = os.pipe()
        if exitcode is not None:
            os.close(self.other)

    def join(self) -> None:
        assert self.exitcode is not None, "it would never return"

    def close(self) -> None:
        os.close(self.sentinel)
        if self.exitcode is None:
            os.close(self.other)


class Broken:
    """A loader's iterator whose connection to a worker was cut."""

    def __init__(self, *workers: Any) -> None:
        self._workers = workers


@pytest.mark.parametrize(
    ("error", "codes", "named"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), [None, -9], "(pid 4242) ended by signal 9"),
        (EOFError(), [1], "(pid 4242) ended with exit code 1"),
        (EOFError(), [0, None, 1], "(pid 4242) ended with exit code 1"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), [None], "(pid 7) is killed"),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), [None], "(pid(s) 7, 8)"),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0."), [None], None),
        (FileNotFoundError(2, "no such file"), [None, 0], None),
    ],
)
def test_whose_end_an_error_of_the_loader_comes_from(
    error: Exception, codes: list[int | None], named: str | None
) -> None:
    workers = [Worker(code) for code in codes]
    found = _ended_worker(Broken(*workers), error)
    for worker in workers:
        worker.close()
    assert found is None if named is None else found is not None and named in found


def test_a_worker_that_has_closed_everything_but_is_not_over_yet_is_named() -> None:
    worker = multiprocessing.get_context("fork").Process(target=_close_everything_and_end_later)
    worker.start()
    found = _ended_worker(Broken(worker), ConnectionResetError(104, "Connection reset by peer"))
    assert found == f"DataLoader worker (pid {worker.pid}) ended with exit code 3."


def _close_everything_and_end_later() -> None:
    os.closerange(0, 1 << 16)
    time.sleep(0.5)
    os._exit(3)


class Traced(Numbered):
    """Leaves a file for each sample that was loaded."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (self.folder / str(index)).touch()
        return super().__getitem__(index)


def test_workers_load_ahead_while_a_step_runs(tmp_path: Path) -> None:
    batches = batches_of(Traced(64, tmp_path), workers=2)
    next(batches)
    deadline = time.monotonic() + 60
    # One that was taken, and eight that are ready.
    while len(list(tmp_path.iterdir())) < 2 * 9:
        assert time.monotonic() < deadline, sorted(each.name for each in tmp_path.iterdir())
        time.sleep(0.01)
    batches.close()

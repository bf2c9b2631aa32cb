"""The multi-process launcher: results, failures, hangs, and what stays behind."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from tests.launch import RankError, run_ranks


def sum_of_ranks(offset: int) -> dict[str, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return {"sum": int(value), "rank": dist.get_rank()}


def fail_on_last_rank() -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("on purpose")
    time.sleep(60)


def hang_with_child(seconds: int) -> None:
    child = subprocess.Popen(["sleep", str(seconds)])
    child.wait()


def not_jsonable() -> object:
    return object()


def test_returns_results_in_rank_order() -> None:
    results = run_ranks(3, "tests.test_launch:sum_of_ranks", 10, timeout=60)
    assert results == [{"sum": 33, "rank": rank} for rank in range(3)]


def test_names_the_rank_that_failed_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 ended with exit code 1(.|\n)*on purpose"):
        run_ranks(2, "tests.test_launch:fail_on_last_rank", timeout=50)
    assert time.monotonic() - start < 40


def test_ends_ranks_and_their_children_on_timeout() -> None:
    seconds = 54321
    with pytest.raises(RankError, match="not done after"):
        run_ranks(1, "tests.test_launch:hang_with_child", seconds, timeout=3)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {seconds}" not in running


def test_a_result_that_is_no_json_is_an_error() -> None:
    with pytest.raises(RankError, match="not JSON serializable"):
        run_ranks(1, "tests.test_launch:not_jsonable", timeout=30)

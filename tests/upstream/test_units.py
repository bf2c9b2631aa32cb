"""The runner of upstream's unit tests, on a small tree in its layout: every way in which a test can end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.upstream.unit import reasons
from tests.upstream.unit.run import UNIT_TESTS, Options, State, run

FILES = {
    "test_small.py": """
        import os

        import pytest
        import torch

        RANK = int(os.environ["LOCAL_RANK"])

        def test_sum_on_the_device():
            assert torch.cuda.device_count() == 2
            torch.distributed.init_process_group("nccl")
            found = torch.full((3,), RANK + 1.0, device="cuda")
            torch.distributed.all_reduce(found)
            assert found.tolist() == [3.0] * 3

        def test_fails_everywhere():
            assert 1 == 2, "one is not two"

        def test_fails_on_one_rank():
            torch.distributed.barrier()
            if RANK == 1:
                raise ValueError("rank one refuses")

        def test_leaves_a_collective_without_a_partner():
            if RANK == 0:
                raise ValueError("rank zero does not come")
            torch.distributed.init_process_group("nccl")

        def test_with_the_same_two_ranks_again():
            torch.distributed.init_process_group("nccl")
            found = torch.ones(1, device="cuda")
            torch.distributed.all_reduce(found)
            assert found.item() == 2

        @pytest.mark.skip(reason="not today")
        def test_skipped():
            raise AssertionError
    """,
    "folder/test_ends.py": """
        import os
        import subprocess
        import sys
        import time

        RANK = int(os.environ["LOCAL_RANK"])

        def test_before():
            pass

        def test_hangs_on_one_rank():
            if RANK == 1:
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                with open(os.environ["PIDS"], "w") as file:
                    file.write(f"{os.getpid()} {child.pid}")
                time.sleep(600)

        def test_dies_on_one_rank():
            if RANK == 0:
                os._exit(3)

        def test_ends_without_a_word():
            os._exit(0)

        def test_after():
            pass
    """,
    "test_unimportable.py": "import a_package_that_nobody_has",
}
REASONS = """
    [[reviewed]]
    backend = "cpu"
    ranks = [2]

    [[reason]]
    kind = "wrong in the test"
    evidence = "fails on purpose"
    tests = ["test_small.py::test_fails_*", "test_small.py::test_leaves_*"]
    says = "r"
    ranks = [2]

    [[reason]]
    kind = "skipped by its author"
    evidence = "carries a mark"
    tests = ["test_small.py::test_skipped"]
    says = "not today"
    ranks = [2]

    [[reason]]
    kind = "ours"
    evidence = "ends on purpose"
    tests = ["folder/test_ends.py::*"]
    says = "did not come to the end"
    ranks = [2]

    [[reason]]
    kind = "needs another package"
    evidence = "nobody has it"
    tests = ["test_unimportable.py"]
    says = "a_package_that_nobody_has"
    ranks = [2, 4]
"""


@dataclass
class Tree:
    """The tree, its reasons and what a run of it printed."""

    options: Options
    pids: Path
    said: Callable[[], str]

    def run(self, reasons_text: str, *only: str) -> int:
        self.options.reasons.write_text(reasons_text)
        return run(replace(self.options, only=only), [2])


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tree:
    import textwrap

    checkout = tmp_path / "checkout"
    for name, text in {"../__init__.py": "", "__init__.py": "", "folder/__init__.py": "", **FILES}.items():
        file = checkout / UNIT_TESTS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    options = Options(
        checkout=checkout, limit=4.0, grace=0.5, state=tmp_path / "state", results=tmp_path,
        reasons=tmp_path / "reasons.toml", preload=("torch.distributed",),
    )  # fmt: skip
    return Tree(options, tmp_path / "pids", lambda: capfd.readouterr().out)


def test_every_way_to_end(tree: Tree) -> None:
    assert tree.run(REASONS) == 0, tree.said()
    assert "problem" not in tree.said()
    (file,) = tree.options.state.parent.glob("upstream-unit-cpu-*.json")
    (found,) = json.loads(file.read_text())["runs"]
    assert found["total"] == {"passed": 4, "failed": 6, "skipped": 1, "cannot be imported": 1}
    assert found["files"]["folder/test_ends.py"] | {"seconds": 0} == {
        "passed": 2, "failed": 3, "skipped": 0, "cannot be imported": 0, "seconds": 0
    }  # fmt: skip
    ranks = {each["test"].rpartition("::")[2]: each["ranks"] for each in found["not_passed"]}
    assert ranks["test_fails_on_one_rank"] == {"passed": [0], "failed": [1]}
    assert ranks["test_leaves_a_collective_without_a_partner"] == {"failed": [0], "did not end": [1]}
    assert ranks["test_hangs_on_one_rank"] == {"passed": [0], "did not end": [1]}
    assert ranks["test_ends_without_a_word"] == {"did not end": [0, 1]}
    assert {each["kind"] for each in found["not_passed"]} == {
        "wrong in the test", "skipped by its author", "ours", "needs another package"
    }  # fmt: skip
    markdown = file.with_suffix(".md").read_text()
    assert "| `test_small.py` | 2 | 3 | 1 |  |" in markdown and "| all | 4 | 6 | 1 | 1 |" in markdown

    # The rank that hung and what it had started are gone.
    deadline = time.monotonic() + 10
    for pid in map(int, tree.pids.read_text().split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    # Everything is done: only the reasons are read again.
    tree.said()
    assert tree.run(REASONS.replace("not today", "not tomorrow")) == 1
    said = tree.said()
    assert "0 files to run, 3 kept from" in said
    assert "unexplained: test_small.py::test_skipped: Skipped: not today" in said
    assert "stale: no test that does not pass is test_small.py::test_skipped and says 'not tomorrow'" in said
    assert tree.run(REASONS.replace("test_fails_*", "test_sum_*")) == 1
    said = tree.said()
    assert said.count("unexplained: ") == 2 and said.count("stale: ") == 1 and "3 problems" in said
    # Reasons of files that were left out are not judged.
    assert tree.run(REASONS.replace("not today", "not tomorrow"), "folder") == 0
    # What nobody has reviewed has no verdict, and says so.
    assert tree.run(REASONS.replace("ranks = [2]\n\n    [[reason]]", "ranks = [4]\n\n    [[reason]]", 1)) == 0
    assert tree.run("") == 0 and "this combination is not reviewed: 8 tests" in tree.said()

    changed = tree.options.checkout / UNIT_TESTS / "folder" / "test_ends.py"
    assert State(tree.options, 2).has("test_small.py")
    changed.write_text(changed.read_text() + "\n")
    assert not State(tree.options, 2).has("test_small.py")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"ours"', '"somehow"'), "has the kind 'somehow'; expected one of needs Transformer Engine itself,"),
        (('says = "not today"', 'says = ""'), "has an empty tests, evidence, says or ranks"),
        (('says = "not today"', 'say = "not today"'), "expected"),
        (("[[reviewed]]", "[[review]]"), "found tables ['review']"),
    ],
)
def test_a_mistake_in_the_reasons_is_named(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    import textwrap

    file = tmp_path / "reasons.toml"
    file.write_text(textwrap.dedent(REASONS).replace(*change))
    with pytest.raises(reasons.ReasonsError) as error:
        reasons.read(file)
    assert says in str(error.value)


def test_two_reasons_for_one_test_are_a_problem(tmp_path: Path) -> None:
    import textwrap

    file = tmp_path / "reasons.toml"
    file.write_text(
        textwrap.dedent(REASONS).replace('["test_small.py::test_skipped"]', '["test_small.py::*"]')
    )
    reviewed, entries = reasons.read(file)
    verdict = reasons.judge(
        {"test_small.py::test_fails_x": "r: not today"}, ["test_small.py"], reviewed, entries,
        backend="cpu", ranks=2, complete=False,
    )  # fmt: skip
    assert verdict.problems[0].startswith("2 reasons explain test_small.py::test_fails_x")


def test_the_reviewed_reasons_can_be_read() -> None:
    reasons.read()


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / UNIT_TESTS).mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        run(Options(checkout=tmp_path, only=("models",)), [1])
    assert (
        end.value.code == 2 and "--only models: no such file or folder with tests" in capsys.readouterr().out
    )

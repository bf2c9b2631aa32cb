"""A trace is its owner's alone, or by option its group's too, with reports and exports made later."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from mt_megatron.cli.main import main
from mt_megatron.scan.format.permissions import MARK, group_may_read, set_group_readable
from mt_megatron.scan.format.run_files import (
    belongs_to,
    changing,
    make_private_folder,
    run_files,
    write_private,
)
from mt_megatron.scan.monitor.alerts import Alerts
from mt_megatron.scan.report.gather import write_report
from mt_megatron.scan.session import session
from tests.scan.diagnose.test_weak_signals import ONE
from tests.scan.handmade import HandmadeRun, write_handmade

OTHER_USER, OTHER_GROUP, OWN_GROUP = 54321, 54322, 54323


@pytest.fixture(params=[0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp(prefix="mt-scan-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def modes(root: Path) -> set[str]:
    """Kinds and modes of everything in ``root`` and of itself."""
    found = [(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in (root, *root.rglob("*"))]
    return {f"{'folder' if folder else 'file'} {mode:04o}" for folder, mode in found}


def make_everything(run: Path, *, group_readable: bool) -> None:
    """A trace, and what its watcher, the report and the exports write into it."""
    with session(run, watch=False, group_readable=group_readable):
        pass
    files = run_files(run)
    shutil.rmtree(files.rank_folder(0))
    write_handmade(run, HandmadeRun(steps=12))
    with Alerts(files.root, say=lambda _: None) as alerts:
        alerts.finding(ONE, named_at_step=1)
    write_report(run)
    with changing(files.control):
        pass
    assert main(["scan", "level", str(run), "full"]) == 0
    assert main(["scan", "trace", str(run)]) == 0


def test_private_by_default(tmp_path: Path, umask: None) -> None:
    make_everything(tmp_path, group_readable=False)
    assert {int(each.split()[1], 8) & 0o077 for each in modes(tmp_path / "scan")} == {0}


def test_everything_is_the_groups_whatever_the_umask(tmp_path: Path, umask: None) -> None:
    make_everything(tmp_path, group_readable=True)
    # The handmade writer makes its rank folders itself.
    for folder in (tmp_path / "scan").glob("rank-*"):
        assert modes(folder) - {"folder 0700"} == {"file 0640"}
        folder.chmod(0o750)
    assert modes(tmp_path / "scan") == {"folder 0750", "file 0640"}
    assert (tmp_path / "scan" / "report" / "report.html").exists()


def test_the_sql_store_is_the_groups_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from mt_megatron.scan.analysis.trace import open_trace
    from mt_megatron.scan.export.sql import ensure_store

    write_handmade(tmp_path, HandmadeRun(steps=6))
    assert ensure_store(open_trace(tmp_path)).stat().st_mode & 0o077 == 0
    set_group_readable(tmp_path / "scan", True)
    shutil.rmtree(tmp_path / "scan" / "store")
    assert modes(ensure_store(open_trace(tmp_path))) == {"folder 0750", "file 0640"}


def test_what_was_there_is_opened_and_closed_again(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=3))
    root = tmp_path / "scan"
    assert set_group_readable(root, True) and group_may_read(root / "rank-00001" / "000000.scan")
    assert modes(root) == {"folder 0750", "file 0640"}
    assert not set_group_readable(root, False)
    assert modes(root) == {"folder 0700", "file 0600"} and not (root / MARK).exists()


def test_a_folder_that_its_owner_opened_stays_open_and_its_files_private(tmp_path: Path) -> None:
    root = tmp_path / "scan"
    root.mkdir()
    root.chmod(0o755)
    set_group_readable(root, False)
    write_private(root / "a.json", "{}")
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "a.json").stat().st_mode) == 0o600


def test_the_group_of_the_folder_is_handed_down(tmp_path: Path) -> None:
    root = tmp_path / "scan"
    root.mkdir()
    root.chmod(0o2700)
    if not root.stat().st_mode & stat.S_ISGID:
        pytest.skip("this file system keeps no set-group-ID bit")
    set_group_readable(root, True)
    make_private_folder(root / "report")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (root, root / "report")] == [0o2750] * 2


def test_each_rank_looks_after_its_own_folder_and_rank_0_after_the_rest() -> None:
    names = ["run.json", "rank-00000", "rank-00001", "rank-00007"]
    assert [[belongs_to(name, rank, 2) for name in names] for rank in (0, 1)] == [
        [True, True, False, True],
        [False, False, True, False],
    ]


def as_user(user: int, group: int, do: Callable[[], int]) -> tuple[int, str]:
    """The exit code of ``do`` and what it printed, as another user in a process of its own."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.setgroups([])
                os.setgid(group)
                os.setuid(user)
                with redirect_stdout(said), redirect_stderr(said):
                    code = do()
                said.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_members_of_the_group_read_and_others_do_not(open_place: Path) -> None:
    run = open_place / "run"
    run.mkdir(mode=0o755)
    write_handmade(run, HandmadeRun(steps=30, slow_rank=1, slow_from=12, factor=1.5))
    out = open_place / "out"
    out.mkdir()
    out.chmod(0o777)

    def report(*more: str) -> int:
        return main(["scan", "report", str(run), *more])

    report()  # what is imported late is imported now: another user may not read the source
    for path in (run, *run.rglob("*")):
        os.chown(path, 0, OWN_GROUP)
    result = ("--output", str(out / "report"))
    for user, group in ((OTHER_USER, OTHER_GROUP), (OTHER_USER, OWN_GROUP)):
        code, said = as_user(user, group, lambda: report(*result))
        assert code == 1 and "--scan-group-readable" in said and "Traceback" not in said
    set_group_readable(run / "scan", True)
    code, said = as_user(OTHER_USER, OTHER_GROUP, lambda: report(*result))
    assert code == 1 and f"user {OTHER_USER} has no permission" in said
    code, said = as_user(OTHER_USER, OWN_GROUP, report)
    assert code == 1 and "--output" in said and "report" in said and "Traceback" not in said
    code, said = as_user(OTHER_USER, OWN_GROUP, lambda: report(*result))
    assert code == 1 and "Rank 1 (node-1) computes slowly" in said
    assert json.loads((out / "report" / "report.json").read_text())["findings"][0]["ranks"] == [1]
    read = run / "scan" / "report" / "report.html"
    assert as_user(OTHER_USER, OWN_GROUP, lambda: int("computes slowly" not in read.read_text()))[0] == 0
    assert as_user(OTHER_USER, OWN_GROUP, lambda: main(["scan", "status", str(run)]))[0] == 0

"""Forks of the warm interpreter: as a cold process to what they run, and nothing left by others."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server, fork_server_process, launch
from tests.launch import ROOT, RankError, run_command, run_ranks

HERE = "tests.test_fork_server"
Servers = dict[frozenset[tuple[str, str]], list[Any]]


def described(argument: str) -> dict[str, Any]:
    """What a target can see of the process that it runs in, once it has what a server imports."""
    for name in fork_server_process.modules():
        importlib.import_module(name)
    import torch

    import mt_megatron

    before = [name for name in sys.modules if name.split(".")[0] == "megatron"]
    report = mt_megatron.patch("cpu")
    found = {
        "argument": argument,
        "argv": [Path(word).name for word in sys.argv[:1]],
        "orig_argv": [Path(word).name for word in sys.orig_argv[:3]],
        "path": sys.path,
        "main": [__import__("__main__").__spec__.name, __import__("__main__").__name__],
        "flags": list(sys.flags),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name not in VARYING},
        "cwd": os.getcwd(),
        "umask": os.umask(0o22),
        "cores": sorted(os.sched_getaffinity(0)),
        "signals": {
            number: str(signal.getsignal(number)).split(" at ")[0] for number in range(1, signal.NSIG)
        },
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads its session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": sorted(
            kind_of(number) for number in os.listdir("/proc/self/fd") if kind_of(number) is not None
        ),
        "upstream before": before,
        "hooks": [str(type(one)) for one in (*sys.meta_path, *sys.path_hooks)],
        "plan": report.plan_digest,
        "patches": [str(patch) for patch in report.patches],
        "torch": [torch.get_num_threads(), str(torch.get_default_dtype())],
        "gradients": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
    }
    return found


VARYING = {"MASTER_PORT", "PYTEST_CURRENT_TEST", fork_server.COLD}


def kind_of(number: str) -> str | None:
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # the folder that was listed
        return None
    return f"{number}: {Path(target).name.partition(':')[0]}"


def leave_everything_changed(folder: str) -> None:
    """Change all that a process has of its own, and end with it changed."""
    import random

    import numpy
    import torch

    import mt_megatron

    mt_megatron.patch("cpu")
    import megatron.core  # noqa: F401

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.add = None  # type: ignore[assignment]
    os.environ["LEFT_BY_ANOTHER"] = "1"
    del os.environ["PATH"]
    os.chdir(folder)
    os.umask(0)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path.insert(0, folder)
    sys.setrecursionlimit(5000)
    warm = sys.modules["tests.launch_left_by_another"] = sys.modules["json"]
    warm.left = True  # type: ignore[attr-defined]


def seeds() -> list[int]:
    import random

    import numpy
    import torch

    return [
        hash("a string"),
        random.getrandbits(60),
        int(numpy.random.randint(1 << 60)),
        torch.initial_seed(),
        int(torch.randint(1 << 60, ())),
    ]


def variables(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def sleep(folder: str) -> None:
    (Path(folder) / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(300)


def warm() -> int:
    """How many forks this process has asked for so far."""
    return fork_server.forks


def test_a_patched_fork_finds_what_one_finds_that_patches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = run_ranks(1, f"{HERE}:described", "x")
    monkeypatch.setattr(launch, "DAILY", False)
    monkeypatch.setattr(launch, "_PATCHED", re.compile(re.escape(HERE)))
    (patched,) = run_ranks(1, f"{HERE}:described", "x")
    assert plain["upstream before"] == [] and "megatron.core" in patched["upstream before"]
    # Which patches wait for the import of their module follows from what is imported.
    different = {name for name in plain if plain[name] != patched[name]} - {"upstream before", "patches"}
    assert not different, {name: (plain[name], patched[name]) for name in different}


def test_a_fork_finds_what_a_cold_process_finds() -> None:
    before = warm()
    (forked,) = run_ranks(1, f"{HERE}:described", "x")
    assert warm() == before + 1, "the rank was no fork"
    (cold,) = run_ranks(1, f"{HERE}:described", "x", cold=True)
    assert warm() == before + 1, "a rank that was to be cold was a fork"
    assert {name: (forked[name], cold[name]) for name in cold if forked[name] != cold[name]} == {}


def test_a_fork_finds_nothing_that_another_has_left(tmp_path: Path) -> None:
    first = run_ranks(1, f"{HERE}:described", "x", timeout=120)
    run_ranks(1, f"{HERE}:leave_everything_changed", str(tmp_path), timeout=120)
    assert run_ranks(1, f"{HERE}:described", "x", timeout=120) == first


def test_seeds_differ_between_ranks_and_calls() -> None:
    first, second = run_ranks(2, f"{HERE}:seeds"), run_ranks(2, f"{HERE}:seeds")
    assert first[0][0] != first[1][0], "both ranks order sets alike"
    drawn = [number for found in first + second for number in found[1:]]
    assert len(set(drawn)) == len(drawn)


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """As at the start of a session, and with one hash seed."""
    servers: Servers = {}
    monkeypatch.setattr(fork_server, "_servers", servers)
    monkeypatch.setattr(fork_server, "_HASH_SEEDS", 1)
    yield servers
    for each in servers.values():
        fork_server._end(each)


def test_variables_that_imports_read_reach_them(no_servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_KEPT_SETS", 1)
    command = [sys.executable, "-c", "print(hash('a string'))"]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        forked, cold = (run_command(command, env=environment, cold=cold) for cold in (False, True))
        assert forked.stdout == cold.stdout
        assert [(dict(key)["PYTHONHASHSEED"], each[0].forks) for key, each in no_servers.items()] == [
            (seed, 1)
        ]


def test_variables_and_paths_that_imports_do_not_read_share_servers(tmp_path: Path) -> None:
    assert run_ranks(1, f"{HERE}:variables", ["RANK"]) == [["0"]]
    before, sets = warm(), len(fork_server._servers)
    found = run_ranks(1, f"{HERE}:variables", ["RANK", "MT_MEGATRON_X"], env={"MT_MEGATRON_X": "a"})
    assert found == [["0", "a"]]
    (tmp_path / "only_here.py").write_text("print(__file__)")
    command = [
        sys.executable,
        "-W",
        "error::UserWarning",
        "-c",
        "import only_here, sys; print(sys.warnoptions)",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment["PYTHONWARNINGS"] = "ignore::FutureWarning,once"
    environment["OMP_NUM_THREADS"] = "1"  # as ranks have it: it is read while torch is imported
    options = "['ignore::FutureWarning', 'once', 'error::UserWarning']"
    for cold in (False, True):
        done = run_command(command, env=environment, cold=cold)
        assert done.stdout.splitlines() == [str(tmp_path / "only_here.py"), options], done
    assert (warm(), len(fork_server._servers)) == (before + 2, sets)
    without = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    assert run_command(command, env=without, cwd=tmp_path / "..").returncode == 1


CODE = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print(sys.argv, sys.path[0])
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(3)",
        "sys.exit('why')",
        "sys.exit(257)",
        "raise ValueError(1)",
        "import os; os.kill(0, 9)",
    ],
)
def test_codes_and_outputs_are_those_of_a_cold_process(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CODE + end)
    for command in (["-c", CODE + end, "a", "-b"], [str(script), "a", "-b"]):
        cold, forked = (
            run_command([sys.executable, *command], cwd=tmp_path, cold=cold) for cold in (True, False)
        )
        assert forked.returncode == cold.returncode
        assert forked.stdout == cold.stdout
        assert forked.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_a_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import sys, __main__\nprint(__name__, __file__, sys.argv, sys.path[0])\n"
    )
    command = [sys.executable, "-m", "tool", "--flag"]
    cold, forked = (run_command(command, cwd=tmp_path, cold=cold) for cold in (True, False))
    assert (forked.returncode, forked.stdout) == (0, cold.stdout)


def test_a_command_that_takes_too_long_is_ended() -> None:
    seconds = f"54322.{os.getpid()}"  # no other process of this machine sleeps for as long
    code = f"import subprocess; subprocess.run(['sleep', '{seconds}'])"
    with pytest.raises(subprocess.TimeoutExpired):
        run_command([sys.executable, "-c", code], timeout=2)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {seconds}" not in running


def test_a_server_that_cannot_import_leaves_the_error_to_a_cold_process(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a broken torch')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run_command([sys.executable, "-c", "import torch"], env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1 and "a broken torch" in done.stderr
    with pytest.raises(RankError, match="exit code 1"):
        run_ranks(1, f"{HERE}:not_there")


@pytest.mark.parametrize("shared", [False, True], ids=["servers of its own", "shared servers"])
def test_forks_end_with_the_process_that_asked_for_them(shared: bool, tmp_path: Path) -> None:
    """Servers end with the last process that is connected."""
    code = f"""
from tests import fork_server
fork_server._HASH_SEEDS = 1
from tests.launch import run_ranks
run_ranks(2, '{HERE}:sleep', {str(tmp_path)!r}, timeout=100)
"""
    assert run_ranks(1, f"{HERE}:warm") == [0]  # a server is there, and this process is connected
    environment = dict(os.environ)
    own = tempfile.mkdtemp()
    if not shared:
        del environment[fork_server.FOLDER]
        environment["TMPDIR"] = own  # where it leaves the folder of its servers
    asking = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while len(found := [path for path in tmp_path.glob("rank*") if path.read_text()]) < 2:
            assert time.monotonic() < deadline and asking.poll() is None
            time.sleep(0.05)
        ranks = [int(path.read_text()) for path in found]
        servers = {int(status(rank)["PPid"]) for rank in ranks}
        assert asking.pid not in servers
    finally:
        asking.kill()
        asking.wait()
        shutil.rmtree(own)
    ending = ranks if shared else [*ranks, *servers]
    deadline = time.monotonic() + 20
    while alive := [pid for pid in ending if status(pid).get("State", "Z")[0] not in "ZX"]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    assert run_ranks(1, f"{HERE}:warm") == [0]
    (mine,) = run_ranks(1, f"{HERE}:parent")
    assert (mine in servers) == shared


def parent() -> int:
    return os.getppid()


def test_of_two_that_start_a_server_at_once_one_does(tmp_path: Path) -> None:
    code = f"""
from tests import fork_server
fork_server._HASH_SEEDS = 1
from tests.launch import run_ranks
print(run_ranks(1, '{HERE}:parent')[0])
input()
"""
    environment = {**os.environ, fork_server.FOLDER: str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    (first, again) = [each.stdout.readline() for each in both if each.stdout]
    assert first == again and int(first) not in [each.pid for each in both]
    for each in both:
        each.communicate("\n")
    deadline = time.monotonic() + 20
    while status(int(first)).get("State", "Z")[0] not in "ZX" or list(tmp_path.glob("*.socket")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

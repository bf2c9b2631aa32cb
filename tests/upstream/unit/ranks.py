"""Run files of tests with pytest on several ranks: a script for ``mt-megatron run``.

Importing torch and Megatron takes each rank seconds of CPU time. This process imports them once; the ranks
of every launch are its forks, with a session, an environment and a rendezvous store of their own. It reads
a request a line from standard input and answers with a line on standard output; a closed input ends it and
every rank that it started. It imports nothing of this project's tests: in the ranks ``tests`` is the
checkout's.

A rank writes what happens to it to a file as it happens, so a rank that hangs or dies loses no other result.
After every test the ranks exchange their outcomes. Where these differ, collectives of one rank may have no
partner on another: the launch ends there, and the next one begins with the following test.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

PRELOAD = "MT_MEGATRON_TEST_PRELOAD"
"""Modules to import before the first launch, separated by commas."""
PLUGINS = ("pytest_mock",)
"""Plugins of pytest that upstream's tests use."""
SAID = "said.{rank}.jsonl"
LOG = "log.{rank}"
_POLL_SECONDS = 0.02
_STACK_SECONDS = 1.0
_IMPORT_SECONDS = 300.0
"""Time to import a file; a test has the request's ``limit``."""
_FOREVER = timedelta(days=7)


class Reporter:
    """The pytest plugin of one rank."""

    def __init__(self, request: dict[str, Any], rank: int, file: IO[str]) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._done, self._ranks, self._rank = set(request["done"]), request["ranks"], rank
        self._file = file
        self._store = TCPStore(
            "127.0.0.1", request["port"], is_master=False, wait_for_workers=False, timeout=_FOREVER
        )
        self._met = 0
        self._outcome = "passed"

    def say(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.say(uncollected=report.nodeid, outcome=report.outcome, text=_text(report))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.say(collected=[item.nodeid for item in items])
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = "passed"
        self.say(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "passed":
            return
        # A test that failed stays failed, whatever its teardown says.
        if self._outcome != "failed":
            self._outcome = report.outcome
        self.say(test=report.nodeid, when=report.when, outcome=report.outcome, text=_text(report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        gc.collect()  # models of tests that are over are cycles
        self.say(ends=nodeid, outcome=self._outcome)
        self._store.set(f"unit/{self._met}/{self._rank}", self._outcome)
        outcomes = {self._store.get(f"unit/{self._met}/{rank}") for rank in range(self._ranks)}
        self._met += 1
        if len(outcomes) > 1:
            # Without any teardown, whose collectives might wait for a rank that is elsewhere.
            self.say(leaves=nodeid)
            _leave()


def _text(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why: the message of a skip, or the traceback with its last line, the error, first."""
    if report.outcome == "skipped":
        return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    return "\n".join(filter(None, [crash.message if crash else "", report.longreprtext]))


def serve() -> None:
    """Answer requests until the input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The folder of this script, whose modules are nobody's.
    sys.path.remove(str(Path(__file__).resolve().parent))
    for name in filter(None, os.environ.pop(PRELOAD, "").split(",")):
        importlib.import_module(name)
    gc.freeze()
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), file=answers, flush=True)
    while line := _line():
        print(json.dumps(_launch(json.loads(line))), file=answers, flush=True)


def _line() -> bytes:
    """The next line of standard input, unbuffered, so that ``select`` sees what has not been read."""
    read = bytearray()
    while not read.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return b""
        read += part
    return bytes(read)


def _launch(request: dict[str, Any]) -> dict[str, Any]:
    """Run the rest of one file; returns the ranks' exit codes and why the launch was ended, if it was."""
    folder = Path(request["folder"])
    pids: list[int] = []
    try:
        for rank in range(request["ranks"]):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                _rank(request, rank)
            pids.append(pid)
        problem = _watch(request, pids)
        codes = [_exit_code(pid) for pid in pids]
    finally:
        for pid in pids:
            # Not reaped yet, so the number is still this rank's; the group holds what it started as well.
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    end(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
    return {
        "codes": codes,
        "problem": problem,
        "logs": [str(folder / LOG.format(rank=r)) for r in range(len(pids))],
    }


def _watch(request: dict[str, Any], pids: list[int]) -> str:
    """Wait for the ranks. Empty when all have ended by themselves, else why they are to be ended."""
    folder = Path(request["folder"])
    news = [_news(folder / SAID.format(rank=rank)) for rank in range(len(pids))]
    ends, leaves = [0] * len(pids), [False] * len(pids)
    heard = time.monotonic()
    failed = died = None
    imported = False
    while True:
        codes = [_exit_code(pid) for pid in pids]
        for rank, each in enumerate(news):
            for said in next(each):
                heard = time.monotonic()
                imported |= "begins" in said
                ends[rank] += "ends" in said
                leaves[rank] |= bool({"leaves", "session"} & said.keys())
                if said.get("outcome") == "failed" and "ends" in said:
                    failed = failed or heard
        # The ranks that had not failed have come to the end of that test too.
        if failed and min(ends) == max(ends):
            failed = None
        if None not in codes:
            return ""
        now = time.monotonic()
        if any(code is not None and not left for code, left in zip(codes, leaves, strict=True)):
            died = died or now
        if died and now - died > request["grace"]:
            return "a rank died"
        if failed and now - failed > request["grace"]:
            return f"a rank failed, and others did not come to its end within {request['grace']:g} s"
        limit = request["limit"] if imported else max(request["limit"], _IMPORT_SECONDS)
        if now - heard > limit:
            for pid, code in zip(pids, codes, strict=True):
                if code is None:
                    os.kill(pid, signal.SIGUSR1)  # writes the stacks to the log
            time.sleep(_STACK_SECONDS)
            return f"no rank said anything for {limit:g} s"
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            raise SystemExit("the input was closed")


def _news(path: Path) -> Iterator[list[dict[str, Any]]]:
    """At each step the lines that have been added to ``path``."""
    while not path.exists():
        yield []
    with open(path, encoding="utf-8") as file:
        rest = ""
        while True:
            *lines, rest = (rest + file.read()).split("\n")
            yield [json.loads(line) for line in lines]


def _exit_code(pid: int) -> int | None:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _rank(request: dict[str, Any], rank: int) -> NoReturn:
    """Become a rank, run pytest and end, in every case."""
    code = 70
    try:
        _become(request, rank)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not go on as the process that it was forked from
        traceback.print_exc()
    finally:
        _leave(code)


def _become(request: dict[str, Any], rank: int) -> None:
    os.setsid()
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    folder = Path(request["folder"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder / LOG.format(rank=rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0" if request["one_device"] else str(rank),
        WORLD_SIZE=str(request["ranks"]),
        LOCAL_WORLD_SIZE=str(request["ranks"]),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TMPDIR=str(folder),
        PYTEST_DEBUG_TEMPROOT=str(folder),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",  # some take seconds to import
    )
    # What was there before the fork is shared.
    limit = request["memory"] + resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    with open(folder / SAID.format(rank=rank), "w", encoding="utf-8") as file:
        reporter = Reporter(request, rank, file)
        arguments = [request["file"], "-p", "no:cacheprovider", "-q", "--tb=short", "-W", "ignore"]
        arguments += ["--capture=sys"]  # what the C++ runtime says when it dies goes to the log
        for name in filter(importlib.util.find_spec, PLUGINS):
            arguments += ["-p", name]
        code = pytest.main(arguments, plugins=[reporter])
        reporter.say(session=int(code))


def _leave(code: int = 0) -> NoReturn:
    """End without taking modules apart: the interpreter's end would wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()

"""Megatron-Core's own unit tests under ``mt-megatron run``, with a reason for each that does not pass."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mt_megatron.backends.distributed.rendezvous import loopback_store
from mt_megatron.checkpoint.files import write_durably
from tests.launch import ROOT
from tests.soak import machine
from tests.upstream.checkout import CheckoutError, checked, unchanged
from tests.upstream.job import ONE_DEVICE
from tests.upstream.prove import surroundings
from tests.upstream.unit import ranks as script
from tests.upstream.unit import reasons, table

UNIT_TESTS = Path("tests", "unit_tests")
PRELOAD = (
    "torch.distributed.checkpoint",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.training.training",
)
STATE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mt_megatron" / "upstream_unit"
LIMIT, GRACE = 300.0, 20.0
_START_SECONDS = 300.0
_SHARE = 0.9
"""Part of the memory that the ranks may have together, and each an equal part of it."""
_MOST = 0.7
"""Part of what is free at the start that one rank may have."""
_TEXT = 6000
_EACH_TEXT = 2000
_DEATH = re.compile(r"terminate called|Fatal Python error")


class RunnerError(RuntimeError):
    """The process that runs the tests broke; the message holds the end of what it wrote."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is run, and where its results are kept."""

    checkout: Path
    backend: str = "cpu"
    only: tuple[str, ...] = ()
    """Files or folders below tests/unit_tests; empty for all."""
    limit: float = LIMIT
    """Seconds without a word of any rank after which a test is ended."""
    grace: float = GRACE
    """Seconds after a rank failed or died in which the others may end the same test."""
    state: Path = STATE
    any_package: bool = False
    """Results of another state of mt_megatron count too."""
    results: Path | None = None
    reasons: Path = reasons.FILE
    preload: tuple[str, ...] = PRELOAD


class Ranks:
    """The process that is forked into ranks, and its launches."""

    def __init__(self, options: Options, ranks: int, scratch: Path) -> None:
        self._options, self._ranks, self._scratch = options, ranks, scratch
        self._log = scratch / "ranks.log"
        self._launches = 0
        # The kernel ends processes of anybody where memory runs out; an allocation that fails ends a test.
        memory = psutil.virtual_memory()
        self._memory = int(min(_SHARE * memory.total / ranks, _MOST * memory.available))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        extra = dict(surroundings(self._options.backend))
        self._one_device = bool(extra.pop(ONE_DEVICE, ""))
        # The root of this project has packages tests and tools, and so has the checkout.
        here = self._scratch / "path"
        here.mkdir()
        (here / "mt_megatron").symlink_to(ROOT / "mt_megatron")
        emulated = [each for each in extra.pop("PYTHONPATH", "").split(os.pathsep) if each != str(ROOT)]
        path = [str(self._options.checkout), *filter(None, emulated), str(here)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",
            "PYTHONDONTWRITEBYTECODE": "1",
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            **extra,
            "PYTHONPATH": os.pathsep.join(path),
            script.PRELOAD: ",".join(self._options.preload),
        }
        command = [sys.executable, "-m", "mt_megatron.cli", "run", "--backend", self._options.backend]
        command += [
            "--redirect",
            str(self._options.checkout / "tests"),
            "--",
            str(Path(script.__file__).resolve()),
        ]
        with open(self._log, "w") as log:
            process = subprocess.Popen(
                command, cwd=self._options.checkout, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._process = process
        threads = self._answer(_START_SECONDS)["threads"]
        if threads != 1:
            raise RunnerError(f"imports have started threads ({threads}): this process cannot be forked")
        return process

    def launch(self, file: Path, done: Sequence[str]) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
        """Run ``file`` without the tests ``done``: what each rank said, and how the launch ended."""
        self._launches += 1
        folder = self._scratch / str(self._launches)
        folder.mkdir()
        store, port = loopback_store()
        request = {
            "folder": str(folder), "file": str(file), "done": list(done), "ranks": self._ranks, "port": port,
            "limit": self._options.limit, "grace": self._options.grace, "one_device": self._one_device,
            "memory": self._memory,
        }  # fmt: skip
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            end = self._answer(None)
            said = [_said(folder / script.SAID.format(rank=rank)) for rank in range(self._ranks)]
            end["logs"] = [_end_of_log(Path(log)) for log in end["logs"]]
        except BrokenPipeError as error:
            raise RunnerError(f"the process of the ranks ended: {self._tail()}") from error
        finally:
            del store
            shutil.rmtree(folder, ignore_errors=True)
        return said, end

    def _answer(self, timeout: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise RunnerError(f"no answer within {timeout} s: {self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise RunnerError(f"the process of the ranks ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_TEXT:]

    def end(self) -> None:
        """Close its input, on which it ends with everything that it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _said(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # A rank that was ended may have written half a line.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def _end_of_log(path: Path) -> str:
    """What a rank wrote when it died, or last."""
    text = path.read_text(errors="replace") if path.exists() else ""
    death = _DEATH.search(text)
    return text[death.start() :][:_EACH_TEXT] if death else text[-_EACH_TEXT:]


@dataclass(kw_only=True)
class FileRun:
    """What is known of one file so far."""

    name: str
    collected: list[str] = field(default_factory=list)
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)

    def result(self, test: str, outcome: str, text: str, ranks: Mapping[str, list[int]]) -> None:
        name = test.removeprefix(f"{UNIT_TESTS}/")
        self.tests[test] = {"test": name, "outcome": outcome, "ranks": dict(ranks), "text": text}


def run_file(ranks: Ranks, name: str) -> list[dict[str, Any]]:
    """All tests of the file ``name``, in as many launches as it takes."""
    found = FileRun(name=name)
    while True:
        known = len(found.tests)
        said, end = ranks.launch(UNIT_TESTS / name, list(found.tests))
        if not _take_collection(found, said, end):
            break
        _take_tests(found, said, end)
        missing = [test for test in found.collected if test not in found.tests]
        if not missing:
            break
        if len(found.tests) == known:
            for test in missing:
                found.result(test, "failed", f"the ranks ended before it: {_end(end)}", {})
            break
    return list(found.tests.values())


def _take_collection(found: FileRun, said: list[list[dict[str, Any]]], end: dict[str, Any]) -> bool:
    """Whether all ranks have collected the same tests; the file's one result otherwise."""
    collected = [next((each["collected"] for each in one if "collected" in each), None) for one in said]
    refused = [each for one in said for each in one if "uncollected" in each]
    if refused:
        outcomes = {each["outcome"] for each in refused}
        outcome = "cannot be imported" if "failed" in outcomes else "skipped"
        text = next(each["text"] for each in refused if outcome == "skipped" or each["outcome"] == "failed")
        found.result(found.name, outcome, text[:_TEXT], {outcome: list(range(len(said)))})
        return False
    if None in collected:
        silent = [rank for rank, each in enumerate(collected) if each is None]
        text = f"ranks {silent} ended before they had collected it: {_end(end)}\n{end['logs'][silent[0]]}"
        found.result(found.name, "cannot be imported", text, {"cannot be imported": silent})
        return False
    first = collected[0]
    assert first is not None
    if any(each != first for each in collected):
        found.result(found.name, "cannot be imported", f"ranks collect other tests: {collected}"[:_TEXT], {})
        return False
    found.collected = first
    return True


def _take_tests(found: FileRun, said: list[list[dict[str, Any]]], end: dict[str, Any]) -> None:
    begun = {each["begins"] for one in said for each in one if "begins" in each}
    ended = [{each["ends"]: each["outcome"] for each in one if "ends" in each} for one in said]
    texts: dict[str, list[str]] = {}
    for one in said:
        for each in one:
            if "test" in each:
                texts.setdefault(each["test"], []).append(each["text"])
    for test in found.collected:
        if test not in begun or test in found.tests:
            continue
        ranks: dict[str, list[int]] = {}
        for rank, outcomes in enumerate(ended):
            ranks.setdefault(outcomes.get(test, "did not end"), []).append(rank)
        outcome = next((each for each in ("failed", "skipped", "passed") if each in ranks), "failed")
        parts = [text[:_EACH_TEXT] for text in dict.fromkeys(texts.get(test, ()))]
        if absent := ranks.get("did not end"):
            outcome = "failed"
            # Their logs have the stacks of ranks that hang. What others say of it is a consequence.
            why = f"ranks {absent} did not come to the end: {_end(end)}"
            parts = [why, *dict.fromkeys(end["logs"][rank] for rank in absent), *parts]
        found.result(test, outcome, "\n".join(parts)[:_TEXT], ranks)


def _end(end: dict[str, Any]) -> str:
    codes = {rank: code for rank, code in enumerate(end["codes"]) if code}
    return ", ".join(filter(None, [end["problem"], f"exit codes {codes}" if codes else ""])) or "exit code 0"


class State:
    """Results of files that are done, in a file that a later run goes on from."""

    def __init__(self, options: Options, ranks: int) -> None:
        self._file = options.state / f"{options.backend}-{ranks}.json"
        self._any_package = options.any_package
        self.package = _digest(ROOT / "mt_megatron", ("*.py", "*.c"), Path(script.__file__))
        self.tests = _digest(options.checkout / UNIT_TESTS, ("*.py",))
        self.files: dict[str, Any] = {}
        if self._file.exists():
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            self.files = {name: each for name, each in kept.items() if each["tests_digest"] == self.tests}

    def has(self, name: str) -> bool:
        return name in self.files and (self._any_package or self.files[name]["package"] == self.package)

    def add(self, name: str, tests: list[dict[str, Any]], seconds: float) -> None:
        self.files[name] = {
            "tests": tests, "seconds": round(seconds, 1), "package": self.package, "tests_digest": self.tests,
        }  # fmt: skip
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._file, json.dumps(self.files, indent=1))


def _digest(folder: Path, kinds: Sequence[str], *more: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({*(path for kind in kinds for path in folder.rglob(kind)), *more}):
        name = path.relative_to(folder) if path.is_relative_to(folder) else path.name
        digest.update(str(name).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def files_of(checkout: Path, only: Sequence[str]) -> tuple[list[str], bool]:
    """Names of the files with tests below tests/unit_tests, and whether these are all."""
    folder = checkout / UNIT_TESTS
    every = sorted(str(path.relative_to(folder)) for path in folder.rglob("test_*.py"))
    wanted = [each.removeprefix(f"{UNIT_TESTS}/").rstrip("/") for each in only]
    for each in wanted:
        if not any(file == each or file.startswith(f"{each}/") for file in every):
            raise CheckoutError(f"--only {each}: no such file or folder with tests below {folder}")
    if not wanted:
        return every, True
    return [f for f in every if any(f == each or f.startswith(f"{each}/") for each in wanted)], False


def run(options: Options, counts: Sequence[int]) -> int:
    """Run, judge and write; 0 where no test is unexplained and no reason is stale, else 1."""
    reviewed, entries = reasons.read(options.reasons)
    files, complete = files_of(options.checkout, options.only)
    parts, records = [], []
    for ranks in counts:
        state = _run_ranks(options, files, ranks)
        results = {name: state.files[name] for name in files}
        tests = {test["test"]: test for each in results.values() for test in each["tests"]}
        verdict = reasons.judge(
            {name: test["text"] for name, test in tests.items() if test["outcome"] != "passed"},
            files, reviewed, entries, backend=options.backend, ranks=ranks, complete=complete,
        )  # fmt: skip
        older = [name for name in files if results[name]["package"] != state.package]
        about = {
            "backend": options.backend,
            "emulated": bool(surroundings(options.backend)),
            "ranks": ranks,
            "older_package": older,
        }
        records.append(table.record(results, verdict, about=about, checkout=options.checkout))
        parts.append(table.as_markdown(records[-1], verdict.explained))
        print(parts[-1], flush=True)
        if older:
            print(f"{len(older)} files ran with another state of mt_megatron: {', '.join(older)}", flush=True)
    if options.results is not None:
        _write(options, parts, records)
    problems = sum(len(each["problems"]) for each in records)
    print(f"{problems} problems" if problems else "passed", flush=True)
    return 1 if problems else 0


def _run_ranks(options: Options, files: Sequence[str], count: int) -> State:
    state = State(options, count)
    todo = [name for name in files if not state.has(name)]
    said = " (the emulator of tests/emulators)" if surroundings(options.backend) else ""
    print(
        f"{options.backend}{said}, {count} ranks: {len(todo)} files to run, {len(files) - len(todo)} kept "
        f"from {options.state}",
        flush=True,
    )
    if not todo:
        return state
    with _ranks(options, count) as ranks:
        for name in todo:
            started = time.monotonic()
            tests = run_file(ranks, name)
            seconds = time.monotonic() - started
            state.add(name, tests, seconds)
            counts = {each: sum(test["outcome"] == each for test in tests) for each in table.COLUMNS}
            words = ", ".join(f"{number} {each}" for each, number in counts.items() if number)
            print(f"{name}: {words or 'no tests'} ({seconds:.0f} s)", flush=True)
    return state


@contextlib.contextmanager
def _ranks(options: Options, count: int) -> Iterator[Ranks]:
    # Paths of sockets in it must not get long.
    with tempfile.TemporaryDirectory(prefix="mtu_", ignore_cleanup_errors=True) as scratch:
        ranks = Ranks(options, count, Path(scratch))
        try:
            yield ranks
        finally:
            ranks.end()


def _write(options: Options, parts: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
    assert options.results is not None
    where, date = machine(), datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    head = [
        f"# Megatron-Core's own unit tests, {date}",
        "",
        "`bash tests/upstream/run.sh CHECKOUT --unit` on a clean checkout of Megatron-LM core_r0.9.0, "
        f"{where['cores']} cores of {where['processor']}, Python {where['python']}, "
        + ", ".join(f"{name} {version}" for name, version in where["packages"].items() if version)
        + f"; commit {where['commit']}. A test has passed where it passed on every rank. Seconds are of a "
        "busy machine and say nothing about speed.",
        "",
    ]
    stem = options.results / f"upstream-unit-{options.backend}-{date}"
    write_durably(stem.with_suffix(".md"), "\n".join(head) + "\n" + "\n".join(parts))
    data = {"date": date, "machine": where, "runs": list(records)}
    write_durably(stem.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
    print(f"written: {stem}.md and .json", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/upstream/run.sh", description=__doc__)
    parser.add_argument("checkout", type=Path, help="root of a core_r0.9.0 checkout of Megatron-LM")
    parser.add_argument("--unit", action="store_true", help="(chooses this program)")
    parser.add_argument("--backend", default="cpu", choices=("cpu", "musa"))
    parser.add_argument("--ranks", default="1", metavar="N,...", help="how many ranks, one run each (1)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FILE", help="files or folders of unit tests"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS",
        help=f"end a test when no rank has said anything for so long ({LIMIT:g})",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=Path, default=STATE, metavar="FOLDER", help=f"results so far ({STATE})"
    )
    parser.add_argument(
        "--any-package", action="store_true", help="also keep results of another state of mt_megatron"
    )
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write the dated table there")
    options = parser.parse_args(arguments)
    try:
        counts = [int(each) for each in options.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks {options.ranks}: expected numbers such as 1,8")
    if min(counts) < 1:
        parser.error(f"--ranks {options.ranks}: expected numbers from 1")
    checkout = checked(options.checkout)
    os.environ.pop("PYTHONPATH", None)
    with unchanged(checkout):
        return run(
            Options(
                checkout=checkout, backend=options.backend, only=tuple(options.only), limit=options.limit,
                state=options.state, any_package=options.any_package, results=options.results,
            ),
            counts,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

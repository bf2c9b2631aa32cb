"""``mt-megatron launch --exclude-hosts``: who starts what when a run has listed hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mt_megatron.cli import launch
from mt_megatron.cli.main import main

TRAIN = ["--model", "llama3_8b", "--mock-data", "--train-iters", "1"]


@pytest.fixture
def lists(tmp_path: Path) -> tuple[str, str]:
    hosts, excluded = tmp_path / "hosts", tmp_path / "excluded-hosts"
    hosts.write_text("node-a slots=4\n127.0.0.1 slots=4\nnode-c slots=4\n")
    excluded.write_text("node-a  # 2026-11-21T00:00:00Z slow_compute of rank 1: 1.4 times\n")
    return str(hosts), str(excluded)


def test_the_others_meet_at_the_first_that_is_left(
    lists: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, excluded = lists
    given = ["launch", "--print", "command", "--hostfile", hosts]
    assert main([*given, "--exclude-hosts", excluded, "--", *TRAIN, "--save", "/shared/run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# on 127.0.0.1", "# on node-c"]
    assert "--nnodes 2" in lines[1] and "--rdzv-endpoint 127.0.0.1:29500" in lines[1]
    assert main([*given, "--", *TRAIN, "--save", "/shared/run"]) == 0
    assert "# on node-a" in capsys.readouterr().out, "nobody is excluded by itself"


def test_slurm_is_told(lists: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["launch", "--print", "slurm", "--nodes", "2", "--gpus-per-node", "4"]
    assert main([*given, "--exclude-hosts", lists[1], "--", *TRAIN, "--save", "/shared/run"]) == 0
    assert "#SBATCH --exclude=node-a\n" in capsys.readouterr().out
    assert main([*given, "--exclude-hosts", "/none", "--", *TRAIN, "--save", "/shared/run"]) == 0
    assert "--exclude" not in capsys.readouterr().out


def test_an_excluded_machine_starts_nothing(
    lists: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, excluded = lists
    Path(excluded).write_text("127.0.0.1\n")
    monkeypatch.setattr(launch, "_start", lambda *given: pytest.fail("it was started"))
    assert main(["launch", "--hostfile", hosts, "--exclude-hosts", excluded, "--", *TRAIN]) == 0
    assert "nothing is started" in capsys.readouterr().err
    assert (
        main(["launch", "--hostfile", hosts, "--exclude-hosts", excluded, "--node-rank", "1", "--", *TRAIN])
        == 0
    )


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool | None, str]]:
    """Of every start: machines, whether this one leads, its address."""
    found: list[tuple[int, bool | None, str]] = []

    def start(job: object, meeting: object, config: object, **_: object) -> int:
        found.append((job.nodes, meeting.hosts_it, meeting.own_address))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(launch, "_start", start)
    return found


def test_a_given_place_is_that_in_the_whole_hostfile(
    lists: tuple[str, str], places: list[tuple[int, bool | None, str]]
) -> None:
    hosts, excluded = lists
    given = ["launch", "--hostfile", hosts, "--exclude-hosts", excluded]
    for place in ("1", "2"):
        assert main([*given, "--node-rank", place, "--", *TRAIN]) == 0
    assert places == [(2, True, "127.0.0.1"), (2, False, "node-c")]


@pytest.mark.parametrize("text", [None, "", "# nobody yet\n"])
def test_spare_machines_wait_while_nobody_is_excluded(
    lists: tuple[str, str],
    places: list[tuple[int, bool | None, str]],
    capsys: pytest.CaptureFixture[str],
    text: str | None,
) -> None:
    """Of three hosts a run of two takes the first two, from its first start on."""
    hosts, excluded = lists
    Path(excluded).unlink()
    if text is not None:
        Path(excluded).write_text(text)
    given = ["launch", "--hostfile", hosts, "--exclude-hosts", excluded, "--nodes", "2"]
    for place in "012":
        assert main([*given, "--node-rank", place, "--", *TRAIN]) == 0
    assert places == [(2, True, "node-a"), (2, False, "127.0.0.1")]
    said = capsys.readouterr().err
    assert "2 of 3 hosts, node-a, 127.0.0.1" in said and "nothing is started" in said
    assert main([*given[:-1], "4", "--node-rank", "0", "--", *TRAIN]) == 2
    assert "3 of 3 hosts are left when none is excluded; expected 4 (--nodes)" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["k8s", "ray"])
def test_schedulers_that_choose_hosts_themselves_refuse_the_list(
    form: str, lists: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    hosts, excluded = lists
    given = ["launch", "--print", form, "--hostfile", hosts, "--exclude-hosts", excluded]
    given += ["--image", "mt:1"] if form == "k8s" else []
    assert main([*given, "--", *TRAIN, "--save", "/shared/run"]) == 2
    said = capsys.readouterr()
    assert not said.out and "Other schedulers choose hosts themselves" in said.err
    assert f"--exclude-hosts is given with --print {form}" in said.err


def test_too_few_hosts_are_refused(lists: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    hosts, excluded = lists
    given = ["launch", "--print", "command", "--exclude-hosts", excluded, "--nodes", "3"]
    assert main([*given, "--hostfile", hosts, "--", *TRAIN]) == 2
    assert "2 of 3 hosts are left" in capsys.readouterr().err
    assert main(["launch", "--print", "command", "--exclude-hosts", excluded, "--", *TRAIN]) == 2
    assert "nothing says which hosts there are" in capsys.readouterr().err
    given = ["launch", "--hostfile", hosts, "--exclude-hosts", "/none", "--node-rank", "0"]
    assert main([*given, "--nodes", "0", "--", *TRAIN]) == 2
    assert "--nodes is 0; expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("listed", "code"), [(True, 79), (False, 1)])
def test_a_stragglers_end_has_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool, code: int
) -> None:
    """torchrun ends with 1 for both."""
    folder = tmp_path / "run" / "scan"
    folder.mkdir(parents=True)
    (folder / "excluded-hosts").write_text("node-x\n")

    def supervise(command: list[str], environment: object, **_: object) -> int:
        assert command[0] == sys.executable
        if listed:
            (folder / "excluded-hosts").write_text("node-x\nnode-y\n")
        return 1

    monkeypatch.setattr("mt_megatron.launching.jobs.supervise.supervise", supervise)
    options = ["--model", "llama3_tiny", "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    assert main(["launch", "--gpus-per-node", "1", "--", *options, "--save", str(tmp_path / "run")]) == code


def test_a_list_that_cannot_be_read_does_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "scan" / "excluded-hosts").mkdir(parents=True)
    monkeypatch.setattr("mt_megatron.launching.jobs.supervise.supervise", lambda *_, **__: 3)
    options = ["--model", "llama3_tiny", "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    assert main(["launch", "--gpus-per-node", "1", "--", *options, "--save", str(tmp_path / "run")]) == 3


@pytest.mark.parametrize(("given", "code"), [([], 2), (["--max-restarts", "0"], 0)])
def test_no_restart_undoes_the_exclusion(
    given: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler's script restarts three times if nothing else is said."""
    leaving = [*TRAIN, "--save", "/shared/run", "--scan-on-straggler", "checkpoint-and-exit"]
    command = ["launch", "--print", "slurm", "--nodes", "2", "--gpus-per-node", "4", *given]
    assert main([*command, "--", *leaving]) == code
    assert ("--max-restarts is 3" in capsys.readouterr().err) == (code == 2)

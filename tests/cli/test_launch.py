"""``mt-megatron launch``: what it prints, what it starts, and what it refuses before anything starts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mt_megatron.cli import launch
from mt_megatron.cli.main import main
from mt_megatron.launching.jobs.supervise import supervise

TRAIN = ["--model", "llama3_8b", "--mock-data", "--train-iters", "1", "--save", "/shared/run"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments, "--", *TRAIN]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_each_host_of_a_hostfile_has_its_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# two machines\nnode-a slots=4\nnode-b slots=4\n")
    lines = printed(
        capsys, "--print", "command", "--hostfile", str(hosts), "--network-interface", "ib0"
    ).splitlines()
    assert lines[0] == "# on node-a" and lines[2] == "# on node-b"
    first, second = shlex.split(lines[1]), shlex.split(lines[3])
    assert first[:4] == ["env", "GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME=ib0", "MCCL_SOCKET_IFNAME=ib0"]
    for words, leads, name in ((first, "true", "node-a"), (second, "false", "node-b")):
        text = " ".join(words)
        assert "--nnodes 2 --nproc-per-node 4 --max-restarts 0" in text
        assert f"--rdzv-endpoint node-a:29500 --rdzv-id mt-megatron --rdzv-conf is_host={leads}" in text
        assert f"--local-addr {name} -m mt_megatron.cli pretrain --model llama3_8b" in text
        assert words[-len(TRAIN) :] == TRAIN


def test_torchrun_is_started_without_torch_in_the_launcher(tmp_path: Path) -> None:
    """Importing it takes seconds, which torchrun spends anyway."""
    code = """
import sys
from mt_megatron.cli.main import main
from mt_megatron.launching.jobs import supervise
supervise.supervise = lambda *given, **more: 50 + ("torch" in sys.modules)
sys.exit(main(sys.argv[1:]))
"""
    words = [
        "launch",
        "--gpus-per-node",
        "8",
        "--",
        *TRAIN,
        "--metrics-path",
        str(tmp_path / "metrics.jsonl"),
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 50, done.stderr


def test_an_ipv6_head_is_bracketed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("[2001:db8::1]:2\n[2001:db8::2]:2\n")
    text = printed(capsys, "--print", "command", "--hostfile", str(hosts))
    assert "--rdzv-endpoint '[2001:db8::1]:29500'" in text and "--local-addr 2001:db8::2" in text


@pytest.mark.parametrize("cores", [None, "96"])
def test_a_slurm_job_without_its_cores_is_warned_of(
    capsys: pytest.CaptureFixture[str], cores: str | None
) -> None:
    given = () if cores is None else ("--cpus-per-node", cores)
    assert main(["launch", "--print", "slurm", "--gpus-per-node", "8", *given, "--", *TRAIN]) == 0
    said = capsys.readouterr()
    assert ("--cpus-per-task=96" in said.out) == (cores is not None)
    assert ("--cpus-per-node is not set" in said.err) == (cores is None)


def test_every_form_is_printed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    many = ("--nodes", "4", "--gpus-per-node", "8")
    script = printed(capsys, "--print", "slurm", "--job-name", "llama", *many)
    assert script.startswith("#!/usr/bin/env bash\n") and "#SBATCH --job-name=llama" in script
    documents = list(yaml.safe_load_all(printed(capsys, "--print", "k8s", "--image", "mt:1", *many)))
    assert [each["kind"] for each in documents] == ["TrainingRuntime", "TrainJob"]
    program = printed(capsys, "--print", "ray", *many)
    compile(program, "job.py", "exec")
    assert "STRICT_SPREAD" in program


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing says what to train"),
        (("--", "--no-such-option", "1"), "there is no option --no-such-option"),
        (("--print", "slurm", "--nodes", "2", "--", *TRAIN), "--gpus-per-node is not set"),
        (("--print", "k8s", "--gpus-per-node", "8", "--", *TRAIN), "--image is not set"),
        (("--nodes", "2", "--gpus-per-node", "1", "--", *TRAIN), "nothing says where they meet"),
        (("--env", "A", "--", *TRAIN), "--env is 'A'"),
        (("--gpus-per-node", "3", "--", *TRAIN, "--global-batch-size", "4"), "global_batch_size is 4"),
        (("--print", "slurm", "--gpus-per-node", "1", "--", *TRAIN[:-2]), "Set --save"),
        (("--hostfile", "/no/such/file", "--", *TRAIN), "cannot be read"),
        (
            ("--nodes", "2", "--gpus-per-node", "1", "--master-addr", "fe80::1%eth0", "--", *TRAIN),
            "without a zone",
        ),
        (
            ("--nodes", "2", "--gpus-per-node", "1", "--from-environment", "--", *TRAIN),
            "PET_MASTER_ADDR is not set",
        ),
    ],
)
def test_wrong_use_is_explained_and_starts_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("mt_megatron.launching.jobs.supervise.supervise", None)
    assert said in refused(capsys, *arguments)


OF_FORMS = {
    "--time 1:00:00": {"slurm"},
    "--partition p": {"slurm"},
    "--account a": {"slurm"},
    "--save-before 300": {"slurm"},
    "--no-requeue": {"slurm"},
    "--image mt:1": {"k8s"},
    "--kubernetes-kind TrainJob": {"k8s"},
    "--namespace default": {"k8s"},
    "--shared-memory 64Gi": {"k8s"},
    "--cpu 4": {"k8s"},
    "--memory 1Gi": {"k8s"},
    "--volume a:/a": {"k8s"},
    "--job-name mt-megatron": {"slurm", "k8s"},
    "--cpus-per-node 4": {"slurm", "ray"},
    "--vendor nvidia": {"slurm", "k8s", "ray"},
    "--node-rank 0": {"command", None},
    "--master-addr a": {"command", None},
    "--master-port 29500": {"command", None},
    "--local-addr a": {"command", None},
    "--rendezvous-id mt-megatron": {"command", None},
    "--from-environment": {"command", None},
}


@pytest.mark.parametrize("option", OF_FORMS)
def test_an_option_of_another_form_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Also where its value is the default: only that it was said counts."""
    monkeypatch.setenv("PET_MASTER_ADDR", "node-0")
    monkeypatch.setattr("mt_megatron.launching.jobs.supervise.supervise", lambda *_, **__: 0)
    for form in (None, "command", "slurm", "k8s", "ray"):
        words = [] if form is None else ["--print", form]
        words += ["--image", "mt:1"] if form == "k8s" and not option.startswith("--image") else []
        code = main(["launch", *words, "--gpus-per-node", "1", *option.split(), "--", *TRAIN])
        said = capsys.readouterr().err
        assert code == (0 if form in OF_FORMS[option] else 2), (form, said)
        here = "without --print" if form is None else f"with --print {form}"
        assert (f"{option.split()[0]} is given {here}; expected it with" in said) == (code == 2)


def test_a_job_that_nothing_starts_again_need_not_save(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--print", "k8s", "--image", "mt:1", "--gpus-per-node", "1"]
    assert "Set --save" in refused(capsys, *given, "--", *TRAIN[:-2])
    assert main(["launch", *given, "--max-restarts", "0", "--", *TRAIN[:-2]]) == 0


@pytest.mark.parametrize(
    ("sizes", "processes"), [([], 1), (["expert"], 2), (["expert", "pipeline"], 4)], ids=str
)
def test_on_a_processor_experts_have_their_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sizes: list[str], processes: int
) -> None:
    monkeypatch.setattr("mt_megatron.launching.jobs.supervise.supervise", lambda *_, **__: 0)
    options = ["--model", "mixtral_tiny", "--backend", "cpu", "--mock-data", "--train-iters", "1"]
    options += ["--lr", "1e-3"]
    for name in sizes:
        options += [f"--{name}-model-parallel-size", "2"]
    assert main(["launch", "--", *options]) == 0, capsys.readouterr().err
    assert f"--nproc-per-node {processes} " in capsys.readouterr().err


@pytest.mark.parametrize(("given", "code"), [(["--from-environment"], 143), ([], 0)])
def test_a_pod_that_was_told_to_end_is_not_done(
    monkeypatch: pytest.MonkeyPatch, given: list[str], code: int
) -> None:
    monkeypatch.setattr(
        "mt_megatron.launching.jobs.supervise.supervise", lambda *_, when_terminated: when_terminated
    )
    assert main(["launch", *given, "--gpus-per-node", "1", "--", *TRAIN]) == code


def test_hosts_and_nodes_must_agree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:1\nb:1\n")
    given = ("--hostfile", str(hosts))
    assert "lists 2 hosts" in refused(capsys, *given, "--nodes", "3", "--", *TRAIN)
    assert "--node-rank is 2; expected 0 to 1" in refused(capsys, *given, "--node-rank", "2", "--", *TRAIN)
    hosts.write_text("a:1\na:1\n")
    assert f"{hosts}:2: found a again" in refused(capsys, *given, "--", *TRAIN)


def test_torchrun_s_own_variables_are_left_to_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MASTER_ADDR", "node-0")
    text = printed(capsys, "--print", "command", "--from-environment", "--nodes", "2", "--gpus-per-node", "8")
    assert "--nnodes 2 --nproc-per-node 8" in text and "rdzv" not in text


# What it supervises, in place of torchrun: a parent whose child is the one that listens.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
sys.exit(child.wait())
"""
CHILD = """
import os, signal, sys, time
def end(number, frame):
    open(sys.argv[1] + ".got", "w").write(signal.Signals(number).name)
    sys.exit(int(sys.argv[2]))
time.sleep(0.5)  # Until here a signal would end it.
signal.signal(signal.SIGUSR1, end)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "got"),
    [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGTERM")],
    ids=lambda value: str(value),
)
def test_signals_reach_the_processes_that_listen(tmp_path: Path, sent: signal.Signals, got: str) -> None:
    mark = tmp_path / "mark"
    process = start_supervised(mark, exit_code=7)
    try:
        if sent is not signal.SIGUSR1:
            # The others would end a process that does not listen yet, as they should.
            wait_for(Path(f"{mark}.ready"), process)
        else:
            wait_for(Path(f"{mark}.started"), process)
        process.send_signal(sent)
        assert process.wait(timeout=30) == 7
        assert Path(f"{mark}.got").read_text() == got
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("sent", "ended", "code"),
    [(signal.SIGTERM, 0, 143), (signal.SIGTERM, 7, 7), (signal.SIGUSR1, 0, 0), (signal.SIGINT, 0, 0)],
    ids=str,
)
def test_sigterm_may_have_a_code_of_its_own(
    tmp_path: Path, sent: signal.Signals, ended: int, code: int
) -> None:
    mark = tmp_path / "mark"
    process = start_supervised(mark, exit_code=ended, when_terminated=143)
    try:
        wait_for(Path(f"{mark}.ready"), process)
        process.send_signal(sent)
        assert process.wait(timeout=30) == code
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_an_interruption_before_training_listens_is_told(
    tmp_path: Path, sent: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    process = start_supervised(mark, exit_code=0)
    try:
        wait_for(Path(f"{mark}.started"), process)
        process.send_signal(sent)
        assert process.wait(timeout=30) == 143
        assert f"launch: {sent.name}: not every training process listens" in capfd.readouterr().err
    finally:
        process.kill()
        process.wait()


def test_nothing_survives_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    process = start_supervised(mark, exit_code=0)
    try:
        wait_for(Path(f"{mark}.ready"), process)
        parent = int(Path(f"{mark}.started").read_text())
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while alive(parent):
            assert time.monotonic() < deadline, "what stands for torchrun outlived its supervisor"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


def start_supervised(mark: Path, exit_code: int, when_terminated: int = 0) -> subprocess.Popen[bytes]:
    code = "import sys\nfrom tests.cli.test_launch import supervised\nsys.exit(supervised(*sys.argv[1:]))"
    return subprocess.Popen([sys.executable, "-c", code, str(mark), str(exit_code), str(when_terminated)])


def supervised(mark: str, exit_code: str, when_terminated: str) -> int:
    """In the process of the test: supervises the parent, which notes its number first."""
    noting = f"import os; open({mark + '.started'!r}, 'w').write(str(os.getpid()))\n"
    command = [sys.executable, "-c", noting + PARENT, CHILD, mark, exit_code]
    return supervise(command, os.environ, when_terminated=int(when_terminated))


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or (path.suffix == ".started" and not path.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_help_names_the_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    text = capsys.readouterr().out
    assert all(form in text for form in launch._FORMS) and "Nothing is submitted" in text

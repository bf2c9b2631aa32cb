"""Two machines that train together, for real: as tasks of a stand-in for Slurm, and as network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 150.0
TINY = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2
    --vocab-size 4096 --seq-length 32 --swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --backend cpu --eval-iters 0 --log-interval 1 --num-workers 1
    --global-batch-size 4
"""


def options(folder: Path, steps: int) -> list[str]:
    places = ["--save", str(folder / "run"), "--data-cache-path", str(folder / "cache")]
    return [
        *TINY.split(),
        *places,
        "--metrics-path",
        str(folder / "metrics.jsonl"),
        "--train-iters",
        str(steps),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launch(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mt_megatron.cli", "launch", *arguments]


def steps_of(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # The last line may be half written.
            records.append(json.loads(line))
    return [int(record["iteration"]) for record in records if "loss" in record and "iteration" in record]


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Slurm


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """Stand-ins: ``srun`` starts its command twice on this machine and hands signals on as Slurm's does,
    ``scontrol`` knows one node twice and writes down what is put into the queue again."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(
        "#!/bin/bash\n"
        "while [[ $1 == --* ]]; do shift; done\n"
        "tasks=()\n"
        'for task in 0 1; do SLURM_NODEID=$task "$@" & tasks+=($!); done\n'
        "trap 'kill -USR1 \"${tasks[@]}\"' USR1\n"
        "trap 'kill -TERM \"${tasks[@]}\"' TERM\n"
        "code=0\n"
        'for task in "${tasks[@]}"; do\n'
        "  while kill -0 $task 2>/dev/null; do wait $task || true; done\n"
        "  wait $task || code=$?\n"
        "done\n"
        "exit $code\n"
    )
    (folder / "scontrol").write_text(
        "#!/bin/bash\n"
        f'if [[ $1 == requeue ]]; then echo "$2" >> {tmp_path}/requeued; exit; fi\n'
        "echo 127.0.0.1; echo 127.0.0.1\n"
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


@dataclass(kw_only=True)
class Batch:
    """A batch job of the stand-in."""

    folder: Path
    script: Path
    bin: Path
    starts: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with open(self.folder / f"output.{self.starts}", "wb") as output:
            return subprocess.Popen(
                ["bash", str(self.script)],
                env=environment()
                | {
                    "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
                    "SLURM_JOB_ID": str(os.getpid() % 10000),
                    "SLURM_RESTART_COUNT": str(self.starts - 1),
                    "SLURM_JOB_NODELIST": "n[1-2]",
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def whole_output(self) -> str:
        return (self.folder / f"output.{self.starts}").read_text(errors="replace")

    def output(self) -> str:
        """Its end, for messages."""
        return self.whole_output()[-4000:]


def batch_of(folder: Path, slurm: Path, steps: int) -> Batch:
    printed = subprocess.run(
        launch(
            *("--print", "slurm", "--nodes", "2", "--gpus-per-node", "1", "--vendor", "none"),
            *("--python", sys.executable, "--network-interface", "lo", "--max-restarts", "0"),
            *("--", *options(folder, steps)),
        ),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert printed.returncode == 0, printed.stderr
    script = folder / "job.sh"
    script.write_text(printed.stdout)
    return Batch(folder=folder, script=script, bin=slurm)


def run_until_told(job: Batch) -> None:
    """Start the job and, after two more steps, do what Slurm does some time before the limit."""
    process, before = job.start(), len(steps_of(job.folder))
    try:
        wait_for(lambda: len(steps_of(job.folder)) >= before + 2, process, job)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=TIMEOUT) == 0, job.output()
    finally:
        end(process)


@pytest.mark.daily
def test_a_slurm_job_of_two_nodes_trains_and_saves_before_its_limit(slurm: Path, tmp_path: Path) -> None:
    job = batch_of(tmp_path, slurm, 100_000)
    run_until_told(job)
    # The lines of the steps, and what torchrun says of a node that ended first, push it out of the last part.
    assert "2 processes: tensor 1, pipeline 1, data 2" in job.whole_output(), job.output()
    assert (tmp_path / "requeued").read_text() == f"{os.getpid() % 10000}\n"
    saved = sorted((tmp_path / "run").glob("iter_*"))
    assert saved and int(saved[-1].name.removeprefix("iter_")) >= 2, job.output()


@pytest.mark.soak
def test_a_slurm_job_goes_on_where_it_was_until_it_is_done(slurm: Path, tmp_path: Path) -> None:
    job = batch_of(tmp_path, slurm, 400)
    run_until_told(job)
    run_until_told(job)
    assert (tmp_path / "requeued").read_text().count("\n") == 2
    process = job.start()
    try:
        assert process.wait(timeout=TIMEOUT) == 0, job.output()
    finally:
        end(process)
    assert steps_of(tmp_path) == list(range(1, 401)), "no step is missing and none is made twice"
    assert (tmp_path / "requeued").read_text().count("\n") == 2, "a run that is done stays out of the queue"


def wait_for(condition: object, process: subprocess.Popen[bytes], job: Batch) -> None:
    assert callable(condition)
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.1)


# Network namespaces


class NotAllowed(Exception):
    """This machine does not let us make namespaces."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NotAllowed(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One namespace with one interface."""

    namespace: str
    interface: str
    address: str


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two namespaces joined by a cable. Raises ``NotAllowed``; nothing stays either way."""
    tag = f"mtm{os.getpid() % 100_000}"
    found = [
        Machine(namespace=f"{tag}{side}", interface=f"{tag}{side}", address=f"10.213.7.{number}")
        for number, side in ((1, "a"), (2, "b"))
    ]
    try:
        if os.geteuid() != 0:
            raise NotAllowed("network namespaces need root")
        for machine in found:
            ip("netns", "add", machine.namespace)
        first, second = found
        ip(
            *("link", "add", first.interface, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        for machine in found:
            inside = ("-n", machine.namespace)
            ip(*inside, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
            ip(*inside, "link", "set", machine.interface, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield found
    except FileNotFoundError as error:
        raise NotAllowed(f"{error.filename} is not installed") from error
    finally:
        # A namespace takes its interface along, and an interface its peer.
        for machine in found:
            with contextlib.suppress(NotAllowed, FileNotFoundError):
                ip("netns", "delete", machine.namespace)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30).stdout


def test_two_hosts_train_together_over_a_network(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            machines = stack.enter_context(two_machines())
        except NotAllowed as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        hostfile = tmp_path / "hosts"
        hostfile.write_text("".join(f"{each.address} slots=1  # {each.namespace}\n" for each in machines))
        processes = []
        for number, machine in enumerate(machines):
            command = launch(
                *("--hostfile", str(hostfile), "--network-interface", machine.interface),
                *("--", *options(tmp_path, 2)),
            )
            with open(tmp_path / f"output.{number}", "wb") as output:
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", machine.namespace, *command],
                        env=environment(),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            stack.callback(end, processes[-1])
        codes = [process.wait(timeout=TIMEOUT) for process in processes]
        outputs = [(tmp_path / f"output.{number}").read_text(errors="replace") for number in (0, 1)]
        assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
        assert steps_of(tmp_path) == [1, 2]
        assert "2 processes: tensor 1, pipeline 1, data 2" in outputs[0] + outputs[1]
        assert "is_host=true" in outputs[0] and "is_host=false" in outputs[1], "each found its own place"
        assert machines[0].namespace in namespaces()
    assert machines[0].namespace not in namespaces() and machines[1].namespace not in namespaces()


def test_namespaces_are_removed_when_something_fails() -> None:
    made: list[Machine] = []
    try:
        with two_machines() as machines:
            made = machines
            raise RuntimeError("something fails")
    except NotAllowed as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    except RuntimeError:
        pass
    assert made and not any(machine.namespace in namespaces() for machine in made)


def test_tensor_parallelism_over_two_hosts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("127.0.0.1 slots=1\n192.0.2.1 slots=1\n")
    done = subprocess.run(
        launch("--hostfile", str(hostfile), "--", *options(tmp_path, 2), "--tensor-model-parallel-size", "2"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "tensor_model_parallel_size is 2 with 1 processes on each node" in done.stderr
    assert "torch.distributed.run" not in done.stderr and not (tmp_path / "run").exists()

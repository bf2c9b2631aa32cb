"""What Slurm, Kubernetes and Ray are given: well formed, and every option arrives as it was said."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.job import LaunchJob, check_job
from mt_megatron.launching.jobs.kubernetes import KubernetesOptions, escaped, manifest_yaml, manifests
from mt_megatron.launching.jobs.ray_entry import RayOptions, ray_program
from mt_megatron.launching.jobs.slurm import SlurmOptions, slurm_script
from mt_megatron.scope.sidecar.sinks import base as sinks
from mt_megatron.training.validate import problems
from tests.launching.schemas import SCHEMAS
from tests.second_lane import DAILY

ANYTHING = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
"""What one word of a command line can be."""

AWKWARD = [
    "",
    "'",
    '"',
    "$(touch x)",
    "`x`",
    "$$(A)",
    "a b",
    "\\",
    "-",
    "--",
    "é\n",
    "#",
    "*",
    "~",
    "{1,2}",
    "!",
]
OPTIONS = st.lists(st.one_of(ANYTHING, st.sampled_from(AWKWARD)), max_size=5).map(tuple)
JOB = LaunchJob(
    options=("--model", "llama3_8b", "--save", "/shared/my run"),
    nodes=2,
    processes_per_node=8,
    name="llama",
    max_restarts=3,
    environment=(("GREETING", "it's $(here)"),),
)
GENERATED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def expanded(text: str, variables: dict[str, str]) -> str:
    """Kubernetes' expansion of a command's words, from its documentation: ``$(NAME)`` of a known variable is
    its value, of an unknown one stays, and ``$$`` is one dollar that means nothing."""
    found, at = [], 0
    while at < len(text):
        if text.startswith("$$", at):
            found.append("$")
            at += 2
            continue
        reference = re.compile(r"\$\(([^)]*)\)").match(text, at)
        if reference is not None and reference[1] in variables:
            found.append(variables[reference[1]])
            at = reference.end()
            continue
        found.append(text[at])
        at += 1
    return "".join(found)


@given(text=st.text("$()AB x"))
def test_kubernetes_gives_words_back_unchanged(text: str) -> None:
    assert expanded(escaped(text), {"A": "1", "B": "2"}) == text


def test_the_expansion_of_this_test_expands() -> None:
    assert expanded("$(A)-$$(A)-$(X)", {"A": "1"}) == "1-$(A)-$(X)"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``srun`` that only writes down its arguments, and a ``scontrol`` that knows two nodes."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "srun").write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\nprintf "%s" "$GREETING" > "$SEEN.env"\n'
    )
    (folder / "scontrol").write_text(
        '#!/bin/bash\n[[ "$1 $2 $3" == "show hostnames n[1-2]" ]] && echo "n1\nn2"\n'
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


def run_slurm(script: str, stand_ins: Path, tmp_path: Path) -> list[str]:
    seen = tmp_path / "seen"
    (tmp_path / "job.sh").write_text(script)
    subprocess.run(
        ["bash", str(tmp_path / "job.sh")],
        check=True,
        timeout=30,
        env={
            "PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}",
            "SEEN": str(seen),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
        },
    )
    return seen.read_bytes().decode().split("\0")[:-1]


@given(options=OPTIONS, value=ANYTHING)
@GENERATED
def test_slurm_hands_every_option_on(
    stand_ins: Path, tmp_path: Path, options: tuple[str, ...], value: str
) -> None:
    job = replace(JOB, options=options, environment=(("GREETING", value),))
    found = run_slurm(slurm_script(job, SlurmOptions()), stand_ins, tmp_path)
    assert tuple(found[found.index("--") + 1 :]) == options
    assert (tmp_path / "seen.env").read_bytes().decode() == value


def test_slurm_starts_one_task_on_each_node_which_meet_at_the_first(stand_ins: Path, tmp_path: Path) -> None:
    found = run_slurm(slurm_script(JOB, SlurmOptions()), stand_ins, tmp_path)
    command = " ".join(found[: found.index("--")])
    assert command.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --export=ALL --kill")
    assert "--nodes 2 --gpus-per-node 8 --max-restarts 3" in command
    assert "--master-addr n1 --master-port 20007 --rendezvous-id 7.0" in command


def test_slurm_gives_the_task_the_cores_of_the_job(stand_ins: Path, tmp_path: Path) -> None:
    """``srun`` of Slurm 22.05 and later does not take them over from ``sbatch``."""
    found = run_slurm(slurm_script(JOB, SlurmOptions(cpus_per_node=64)), stand_ins, tmp_path)
    assert "--cpus-per-task=64" in found[: found.index("--kill-on-bad-exit=1")]


def test_slurm_hands_the_script_s_variables_on(stand_ins: Path, tmp_path: Path) -> None:
    """``srun`` of a job that was submitted with ``--export=NONE`` does not."""
    found = run_slurm(slurm_script(JOB, SlurmOptions()), stand_ins, tmp_path)
    assert "--export=ALL" in found[: found.index("--kill-on-bad-exit=1")]


def directives(script: str) -> dict[str, str]:
    """The options that sbatch reads: those before the first command."""
    found = {}
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[name] = value
    return found


def test_slurm_is_told_what_was_asked() -> None:
    asked = SlurmOptions(time="2-00:00:00", partition="gpu", account="a1", cpus_per_node=64, save_before=600)
    assert directives(slurm_script(JOB, asked)) == {
        "job-name": "llama",
        "nodes": "2",
        "ntasks-per-node": "1",
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": "B:USR1@600",
        "requeue": "",
        "gpus-per-node": "8",
        "cpus-per-task": "64",
        "time": "2-00:00:00",
        "partition": "gpu",
        "account": "a1",
    }
    plain = slurm_script(JOB, SlurmOptions(devices=False, requeue=False))
    assert "no-requeue" in directives(plain) and "gpus-per-node" not in directives(plain)
    assert "scontrol requeue" not in plain


@given(options=OPTIONS)
@settings(max_examples=30)
def test_options_never_become_directives(options: tuple[str, ...]) -> None:
    hostile = (*options, "x\n#SBATCH --nodes=99\n")
    assert directives(slurm_script(replace(JOB, options=hostile), SlurmOptions()))["nodes"] == "2"


@pytest.mark.parametrize(
    "wrong",
    [{"time": "soon"}, {"partition": "a b"}, {"account": "x\ny"}, {"cpus_per_node": 0}, {"save_before": 0}],
    ids=str,
)
def test_slurm_values_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        slurm_script(JOB, SlurmOptions(**wrong))


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    (tmp_path / "job.sh").write_text(slurm_script(JOB, SlurmOptions(time="1:00:00")))
    subprocess.run(["shellcheck", "--severity=warning", str(tmp_path / "job.sh")], check=True, timeout=60)


KUBERNETES = KubernetesOptions(
    image="registry.example/mt:1",
    cpu="96",
    memory="1Ti",
    claims=(("data", "/data"), ("runs", "/runs"), ("data", "/more")),
)


def loaded(job: LaunchJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all(manifest_yaml(job, options)))
    for document in found:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    return found


def containers(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Everything that has a command."""
    waiting: list[Any] = list(documents)
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "command" in one:
                yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob"])
@given(options=OPTIONS, value=ANYTHING)
@example(options=("a\x85b", "\u2028"), value="é\x85")
@settings(max_examples=25 if DAILY else 12, deadline=None)
def test_kubernetes_hands_every_option_on(kind: Any, options: tuple[str, ...], value: str) -> None:
    job = replace(JOB, options=options, environment=(("GREETING", value),))
    found = list(containers(loaded(job, replace(KUBERNETES, kind=kind))))
    assert found
    for one in found:
        words = [
            expanded(word, {"GREETING": "wrong", "A": "wrong"}) for word in [*one["command"], *one["args"]]
        ]
        assert tuple(words[words.index("--") + 1 :]) == options
        assert [expanded(each["value"], {"A": "wrong"}) for each in one["env"]] == [value]


@pytest.mark.parametrize("vendor", ["nvidia", "mthreads", "none"])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob"])
def test_manifests_fit_their_schemas(kind: Any, nodes: int, vendor: Any) -> None:
    documents = loaded(replace(JOB, nodes=nodes), replace(KUBERNETES, kind=kind, vendor=vendor))
    text = str(documents)
    assert ("nvidia.com/gpu" in text) == (vendor == "nvidia")
    assert ("mthreads.com/gpu" in text) == (vendor == "mthreads")
    assert "/dev/shm" in text and "'medium': 'Memory'" in text
    if kind == "PyTorchJob":
        replicas = documents[0]["spec"]["pytorchReplicaSpecs"]
        assert sum(each["replicas"] for each in replicas.values()) == nodes
        assert documents[0]["spec"]["nprocPerNode"] == "8"
    else:
        runtime, job = documents
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "llama"
        assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == nodes


def test_the_schemas_find_what_is_wrong() -> None:
    (document,) = manifests(JOB, replace(KUBERNETES, kind="PyTorchJob"))
    for change in (
        lambda d: d["spec"].update(nprocPerNode=8),
        lambda d: d["spec"].update(nprocsPerNode="8"),
        lambda d: d["spec"]["pytorchReplicaSpecs"].pop("Master"),
        lambda d: d["metadata"].update(name="Not A Name"),
        lambda d: d["spec"]["pytorchReplicaSpecs"]["Worker"].update(replicas=0),
    ):
        wrong = yaml.safe_load(yaml.safe_dump(document))
        change(wrong)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMAS["PyTorchJob"])


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"image": "a b"}, "--image"),
        ({"image": "-x"}, "--image"),
        ({"namespace": "Mine"}, "--namespace"),
        ({"shared_memory": "lots"}, "--shared-memory"),
        ({"memory": "-1"}, "--memory"),
        ({"claims": (("data", "relative"),)}, "--volume"),
        ({"claims": (("a", "/x"), ("b", "/x"))}, "--volume"),
        ({"claims": (("a", "/dev/shm"),)}, "--volume"),
    ],
)
def test_kubernetes_values_that_cannot_be_are_refused(wrong: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        manifests(JOB, replace(KUBERNETES, **wrong))


def constants(program: str) -> dict[str, Any]:
    """The literals at the top of the program."""
    found = {}
    for node in ast.parse(program).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


@given(options=OPTIONS, value=ANYTHING)
def test_ray_hands_every_option_on(options: tuple[str, ...], value: str) -> None:
    found = constants(
        ray_program(replace(JOB, options=options, environment=(("GREETING", value),)), RayOptions())
    )
    assert tuple(found["OPTIONS"][1:]) == options and found["OPTIONS"][0] == "--"
    assert found["ENVIRONMENT"] == {"GREETING": value}


class FakeRay(types.ModuleType):
    """As much of Ray as the program uses, in one process: tasks run when their result is asked for.

    A stand-in: it shows that the program hangs together, not that Ray takes it.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.group: dict[str, Any] = {}
        self.placed: list[tuple[int, dict[str, Any]]] = []
        self.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def init(self, address: str) -> None:
        assert address == "auto"

    def remote(self, **options: Any) -> Any:
        def decorate(function: Any) -> Any:
            def task(**more: Any) -> Any:
                place = more.pop("scheduling_strategy")
                self.placed.append((place, {**options, **more}))
                return types.SimpleNamespace(remote=lambda *args: lambda: function(*args))

            return types.SimpleNamespace(options=task)

        return decorate

    def get(self, waiting: Any) -> Any:
        return [each() for each in waiting] if isinstance(waiting, list) else waiting()


@pytest.mark.parametrize("threads", [None, "2"])
def test_ray_places_one_torchrun_on_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    ray = FakeRay()
    # As Ray sets it for a task: to its num_cpus.
    monkeypatch.setenv("OMP_NUM_THREADS", "4")

    def placement_group(bundles: list[dict[str, int]], strategy: str) -> Any:
        ray.group = {"bundles": bundles, "strategy": strategy}
        return types.SimpleNamespace(ready=lambda: lambda: None)

    parts = {
        "ray": ray,
        "ray.util": types.ModuleType("ray.util"),
        "ray.util.placement_group": types.ModuleType("ray.util.placement_group"),
        "ray.util.scheduling_strategies": types.ModuleType("ray.util.scheduling_strategies"),
    }
    parts["ray.util.placement_group"].placement_group = placement_group  # type: ignore[attr-defined]
    parts["ray.util.scheduling_strategies"].PlacementGroupSchedulingStrategy = (  # type: ignore[attr-defined]
        lambda group, placement_group_bundle_index: placement_group_bundle_index
    )
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$*" >> {tmp_path}/seen\n'
        f'echo "${{OMP_NUM_THREADS-none}}" >> {tmp_path}/threads\nexit "${{CODE:-0}}"\n'
    )
    script.chmod(0o755)
    given = () if threads is None else (("OMP_NUM_THREADS", threads),)
    job = replace(JOB, python=str(script), environment=(("CODE", "5"), *given))
    names: dict[str, Any] = {"__name__": "job"}
    exec(compile(ray_program(job, RayOptions(cpus_per_node=4, vendor="mthreads")), "job.py", "exec"), names)
    assert names["main"]() == 5, "a machine's exit code is the program's"
    assert ray.group == {"bundles": [{"CPU": 4, "mthreads_gpu": 8}] * 2, "strategy": "STRICT_SPREAD"}
    assert [place for place, _ in ray.placed] == [0, 0, 1]
    assert ray.placed[1][1]["num_cpus"] == 4 and ray.placed[1][1]["resources"] == {"mthreads_gpu": 8}
    assert (tmp_path / "threads").read_text().split() == [threads or "none"] * 2, "ranks share the processors"
    lines = (tmp_path / "seen").read_text().splitlines()
    assert [re.findall(r"--node-rank (\d)", line)[0] for line in lines] == ["0", "1"]
    assert all("-- --model llama3_8b --save /shared/my run" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"processes_per_node": 0}, "--gpus-per-node is 0"),
        ({"max_restarts": -1}, "--max-restarts is -1"),
        ({"name": "Llama 3"}, "--job-name is 'Llama 3'"),
        ({"options": ()}, "nothing says what to train"),
        ({"options": ("--model", "a\0b")}, "NUL"),
        ({"environment": (("A B", "x"),)}, "'A B'"),
        ({"interface": "eth0 "}, "--network-interface"),
        ({"options": ("--model", "llama3_8b", "--train-iters", "1")}, "Set --save"),
        (
            {
                "options": ("--model", "llama3_8b", "--train-iters", "1", "--save", "/x"),
                "processes_per_node": 3,
                "nodes": 1,
            },
            None,
        ),
    ],
)
def test_jobs_are_checked_before_anything_is_written(change: dict[str, Any], said: str | None) -> None:
    mock = ("--mock-data", "--lr", "1e-4")
    job = replace(JOB, options=(*JOB.options, *mock, "--train-iters", "1"))
    job = replace(job, **change)
    if "options" in change and change["options"]:
        job = replace(job, options=(*job.options, *mock))
    if said is None:
        assert check_job(job, restarts=True).checkpoint.save == "/x"
        return
    with pytest.raises(ConfigError) as error:
        check_job(job, restarts=True)
    assert said in str(error.value)


def test_packages_may_be_on_the_machines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder in (importlib.util, sinks):
        monkeypatch.setattr(holder, "find_spec", lambda name: None)
    options = (*JOB.options, "--mock-data", "--train-iters", "1", "--transformer-impl", "transformer_engine")
    options += ("--tensorboard-dir", "/shared/board", "--wandb-project", "p")
    options += ("--scope", "record", "--scope-sink", "trackio:p")
    config = check_job(replace(JOB, options=options), restarts=True)
    here = problems(config, world_size=JOB.world_size)
    for package in ("transformer_engine", "tensorboard", "wandb", "trackio"):
        assert any(package in line and "not installed" in line for line in here), "where it runs it is needed"


def test_a_lab_file_that_is_here_is_read(tmp_path: Path) -> None:
    lab = tmp_path / "lab.yaml"
    options = (*JOB.options, "--mock-data", "--train-iters", "9", "--scope", "record")
    options += ("--scope-lab", str(lab))
    job = replace(JOB, options=options)
    check_job(job, restarts=True)  # Only the machines may have it.
    too_long = (*options[:-1], f"{tmp_path}/{'x' * 300}.yaml")
    check_job(replace(job, options=too_long), restarts=True)
    lab.write_text("perturbations: [{kind: scale, on: weight, module: '*', factor: 2, steps: 10-12}]")
    with pytest.raises(ConfigError, match=r"--scope-lab: .* has steps 10-12; expected a first of at most 9"):
        check_job(job, restarts=True)
    lab.write_text("perturbations: [{kind: bit_flop}]")
    with pytest.raises(ConfigError, match=r"--scope-lab: .*bit_flop"):
        check_job(job, restarts=True)


def test_tensor_parallelism_over_several_nodes_is_refused_unless_allowed() -> None:
    options = (*JOB.options, "--mock-data", "--train-iters", "1", "--tensor-model-parallel-size", "8")
    job = replace(JOB, options=options, processes_per_node=4, nodes=4)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size is 8 with 4 processes on each node"):
        check_job(job, restarts=True)
    check_job(replace(job, options=(*options, "--allow-tensor-parallel-across-nodes")), restarts=True)
    check_job(replace(job, processes_per_node=8), restarts=True)

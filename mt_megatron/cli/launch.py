"""``mt-megatron launch``: torchrun on this machine, or what a scheduler needs to start it on many."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.launching.jobs.hosts import (
    Host,
    node_rank,
    read_excluded,
    read_hostfile,
    remaining,
    slots_of,
)
from mt_megatron.launching.jobs.job import LaunchJob, check_job
from mt_megatron.launching.jobs.kubernetes import RESOURCES, KubernetesOptions, manifest_yaml
from mt_megatron.launching.jobs.ray_entry import RayOptions, ray_program
from mt_megatron.launching.jobs.slurm import SlurmOptions, slurm_script
from mt_megatron.launching.jobs.torchrun import DEFAULT_PORT, LOOPBACK, Meeting, torchrun_command

_FORMS = ("command", "slurm", "k8s", "ray")
_RESTARTS = 3
_TERMINATED = 128 + signal.SIGTERM
_STARTS = (None, "command")
_OPTIONS_OF_FORMS: dict[tuple[str | None, ...], tuple[str, ...]] = {
    ("slurm",): ("--time", "--partition", "--account", "--save-before", "--no-requeue"),
    ("k8s",): (
        *("--image", "--kubernetes-kind", "--namespace", "--shared-memory", "--cpu", "--memory"),
        "--volume",
    ),
    ("slurm", "k8s"): ("--job-name",),
    ("slurm", "ray"): ("--cpus-per-node",),
    ("slurm", "k8s", "ray"): ("--vendor",),
    _STARTS: (
        *("--node-rank", "--master-addr", "--master-port", "--local-addr", "--rendezvous-id"),
        "--from-environment",
    ),
    (*_STARTS, "slurm"): ("--exclude-hosts",),
}
"""Forms (None: a start) -> the options that only these read."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "launch",
        description="Start torchrun for this machine's part of a training run; or, with --print, write a\n"
        "Slurm script, Kubernetes manifests or a Ray program to standard output. Nothing is submitted.",
        usage="mt-megatron launch [options] -- OPTIONS OF MT-MEGATRON PRETRAIN",
        epilog="examples:\n"
        "  mt-megatron launch -- --config run.yaml\n"
        "  mt-megatron launch --hostfile hosts -- --config run.yaml        (on every host)\n"
        "  mt-megatron launch --print slurm --nodes 8 --gpus-per-node 8 --time 12:00:00 \\\n"
        "    -- --config run.yaml --save /shared/run > job.sh\n\n"
        "exit codes: that of the first process that failed; 2 when none was started; 79 when the run left\n"
        "because of a straggler; 143 after SIGTERM with --from-environment, and after SIGTERM or Ctrl-C\n"
        "before the first step",
    )
    parser.add_argument(
        "--print", dest="form", choices=_FORMS, help="print this instead of starting anything"
    )
    _add_job(parser)
    _add_meeting(parser)
    _add_schedulers(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(func=run, after_dashes="mt-megatron pretrain")
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, metavar="N", help="machines (those of the hostfile, else 1)")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="processes on each machine (slots=, else its devices)"
    )
    parser.add_argument("--hostfile", type=Path, metavar="F", help="the machines, the first one to meet at")
    parser.add_argument(
        "--exclude-hosts",
        type=Path,
        metavar="F",
        help="do without the hosts listed here (RUN/scan/excluded-hosts)",
    )
    parser.add_argument("--job-name", metavar="NAME", help="Slurm, Kubernetes (mt-megatron)")
    parser.add_argument(
        "--python", metavar="PATH", help="interpreter on the machines (this one; python if printed)"
    )
    parser.add_argument(
        "--max-restarts", type=int, metavar="N", help=f"starts after a failure (0; {_RESTARTS} if printed)"
    )
    parser.add_argument("--network-interface", metavar="IF", help="interface of the collectives")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="variable to set on every machine"
    )


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the machines meet (set by what --print writes)")
    group.add_argument("--node-rank", type=int, metavar="R", help="this machine's number, from 0")
    group.add_argument("--master-addr", metavar="ADDRESS", help="an address of the first machine")
    group.add_argument("--master-port", type=int, metavar="PORT", help=f"({DEFAULT_PORT})")
    group.add_argument("--local-addr", metavar="ADDRESS", help="how the others reach this machine")
    group.add_argument("--rendezvous-id", metavar="ID", help="(mt-megatron)")
    group.add_argument(
        "--from-environment", action="store_true", help="all this is in torchrun's PET_* variables"
    )


def _add_schedulers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedulers")
    group.add_argument("--time", metavar="LIMIT", help="Slurm: time limit")
    group.add_argument("--partition", metavar="NAME", help="Slurm")
    group.add_argument("--account", metavar="NAME", help="Slurm")
    group.add_argument(
        "--save-before",
        type=int,
        metavar="SECONDS",
        help="Slurm: end so long before the limit (300)",
    )
    group.add_argument("--no-requeue", action="store_true", help="Slurm: do not go on in another job")
    group.add_argument("--cpus-per-node", type=int, metavar="N", help="Slurm, Ray")
    group.add_argument(
        "--vendor",
        choices=tuple(RESOURCES),
        help="Slurm, Kubernetes, Ray: whose devices (nvidia)",
    )
    group.add_argument("--image", metavar="IMAGE", help="Kubernetes: the container's image")
    group.add_argument("--kubernetes-kind", choices=("TrainJob", "PyTorchJob"), help="(TrainJob)")
    group.add_argument("--namespace", metavar="NAME", help="Kubernetes (default)")
    group.add_argument("--shared-memory", metavar="SIZE", help="Kubernetes: of /dev/shm (64Gi)")
    group.add_argument("--cpu", metavar="N", help="Kubernetes: processors of a pod")
    group.add_argument("--memory", metavar="SIZE", help="Kubernetes: memory of a pod")
    group.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:PATH", help="Kubernetes: mount a volume claim"
    )


def run(args: argparse.Namespace) -> int:
    """Print, or start torchrun and return its exit code. Raises ``ConfigError`` before anything starts."""
    options = args.command[1:] if args.command[:1] == ["--"] else args.command
    _check_form(args)
    hosts = read_hostfile(args.hostfile) if args.hostfile is not None else []
    excluded = read_excluded(args.exclude_hosts) if args.exclude_hosts is not None else []
    if excluded or (hosts and args.exclude_hosts is not None):
        everyone, hosts = hosts, _without(args, hosts, excluded)
        if args.form is None and not _has_a_place(args, everyone, hosts):
            _say("this machine is excluded, or not needed: nothing is started")
            return 0
    job = _job(args, options, hosts)
    printed = args.form in ("slurm", "k8s", "ray")
    again = (printed and job.max_restarts > 0) or (args.form == "slurm" and not args.no_requeue)
    config = check_job(job, restarts=again)
    if printed:
        print(_rendered(args, job, excluded), end="")
        return 0
    if args.form == "command":
        for line in _commands(args, job, hosts):
            print(line)
        return 0
    meeting = _meeting(args, job, hosts, _rank(args, hosts))
    # A pod that ended with 0 is done for its cluster, whatever is left to train.
    return _start(job, meeting, config, when_terminated=_TERMINATED if args.from_environment else 0)


def _check_form(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` that names every given option that this form would not read."""
    found = []
    for forms, options in _OPTIONS_OF_FORMS.items():
        for option in options:
            value = getattr(args, option[2:].replace("-", "_"))
            if args.form in forms or value is None or value is False or value == []:
                continue
            named = ["a start without --print"] if None in forms else []
            named += [f"--print {form}" for form in forms if form is not None]
            here = "without --print" if args.form is None else f"with --print {args.form}"
            advice = f"Leave {option} out."
            if option == "--exclude-hosts":
                advice = "Other schedulers choose hosts themselves: exclude them there."
            found.append(f"{option} is given {here}; expected it with {' or '.join(named)}. {advice}")
    if found:
        raise ConfigError("\n".join(found))


def _without(args: argparse.Namespace, hosts: list[Host], excluded: list[Host]) -> list[Host]:
    names = ", ".join(host.name for host in excluded)
    if args.form == "slurm":
        return hosts
    if not hosts:
        raise ConfigError(
            f"--exclude-hosts lists {names} and nothing says which hosts there are; expected --hostfile, or "
            "--print slurm. Other schedulers choose hosts themselves: exclude it there."
        )
    if args.nodes is not None and args.nodes < 1:
        raise ConfigError(f"--nodes is {args.nodes}; expected at least 1.")
    left = remaining(hosts, excluded, args.nodes)
    if excluded or len(left) < len(hosts):
        without = f"without {names}: " if excluded else ""
        _say(f"{without}{len(left)} of {len(hosts)} hosts, {', '.join(host.name for host in left)}")
    return left


def _has_a_place(args: argparse.Namespace, everyone: list[Host], left: list[Host]) -> bool:
    """Whether this machine is one of ``left``; a given --node-rank becomes its place among them."""
    place = _rank(args, everyone)
    if place is None or everyone[place] not in left:
        return False
    args.node_rank = left.index(everyone[place])
    return True


def _job(args: argparse.Namespace, options: list[str], hosts: list[Host]) -> LaunchJob:
    nodes = args.nodes
    if hosts and nodes is not None and nodes != len(hosts):
        raise ConfigError(
            f"--nodes is {nodes} and {args.hostfile} lists {len(hosts)} hosts; expected the same number. "
            "Leave --nodes out."
        )
    environment = tuple(_assignment(each) for each in args.env)
    printed = args.form is not None
    restarts = args.max_restarts
    if restarts is None:
        restarts = _RESTARTS if printed and args.form != "command" else 0
    return LaunchJob(
        options=tuple(options),
        nodes=nodes if nodes is not None else max(1, len(hosts)),
        processes_per_node=_processes(args, options, hosts, printed),
        python=args.python or ("python" if printed else sys.executable),
        max_restarts=restarts,
        interface=args.network_interface,
        environment=environment,
        **_given(name=args.job_name),
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--env is {text!r}; expected NAME=VALUE")
    return name, value


def _processes(args: argparse.Namespace, options: list[str], hosts: list[Host], printed: bool) -> int:
    if args.gpus_per_node is not None:
        return int(args.gpus_per_node)
    slots = slots_of(hosts) if hosts else None
    if slots is not None:
        return slots
    if printed and args.form != "command":
        raise ConfigError(
            "--gpus-per-node is not set; expected the number of devices on each machine, which this one "
            "cannot know."
        )
    if not options:
        return 1  # check_job says what is missing.
    return _devices_here(options)


def _devices_here(options: list[str]) -> int:
    """One process per device; on a CPU the fewest that the layout allows."""
    from mt_megatron.backends import registry
    from mt_megatron.training.init_from_hf import load_run

    config = load_run(options)
    backend, reason = registry.select(config.launch.backend)
    count = backend.device_count() if backend.device_type != "cpu" else config.fewest_processes
    _say(f"{count} process{'es' if count > 1 else ''} on this machine: {backend.name} ({reason})")
    return count


def _rendered(args: argparse.Namespace, job: LaunchJob, excluded: list[Host]) -> str:
    if args.form == "slurm":
        if args.cpus_per_node is None:
            _say(
                "--cpus-per-node is not set, so the script asks for no cores: Slurm may give one to "
                f"the {job.processes_per_node} processes of a machine. Give the number of a machine's cores"
            )
        return slurm_script(
            job,
            SlurmOptions(
                time=args.time,
                partition=args.partition,
                account=args.account,
                cpus_per_node=args.cpus_per_node,
                devices=args.vendor != "none",
                requeue=not args.no_requeue,
                exclude=tuple(host.name for host in excluded),
                **_given(save_before=args.save_before),
            ),
        )
    if args.form == "ray":
        return ray_program(job, RayOptions(**_given(cpus_per_node=args.cpus_per_node, vendor=args.vendor)))
    if args.image is None:
        raise ConfigError("--image is not set; expected the container image that holds mt_megatron.")
    return manifest_yaml(
        job,
        KubernetesOptions(
            image=args.image,
            cpu=args.cpu,
            memory=args.memory,
            claims=tuple(_claim(each) for each in args.volume),
            **_given(
                kind=args.kubernetes_kind,
                namespace=args.namespace,
                vendor=args.vendor,
                shared_memory=args.shared_memory,
            ),
        ),
    )


def _given(**values: Any) -> dict[str, Any]:
    """``values`` without those that nobody gave: defaults are those of the options' class."""
    return {name: value for name, value in values.items() if value is not None}


def _claim(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not colon:
        raise ConfigError(f"--volume is {text!r}; expected CLAIM:/PATH")
    return claim, path


def _rank(args: argparse.Namespace, hosts: list[Host]) -> int | None:
    if args.node_rank is not None:
        if args.node_rank < 0 or (hosts and args.node_rank >= len(hosts)):
            most = f" to {len(hosts) - 1}" if hosts else ""
            raise ConfigError(f"--node-rank is {args.node_rank}; expected 0{most}.")
        return int(args.node_rank)
    return node_rank(hosts) if hosts else None


def _meeting(args: argparse.Namespace, job: LaunchJob, hosts: list[Host], rank: int | None) -> Meeting | None:
    if args.from_environment:
        if "PET_MASTER_ADDR" not in os.environ and job.nodes > 1:
            raise ConfigError(
                "--from-environment is given and PET_MASTER_ADDR is not set; expected torchrun's PET_* "
                "variables. Set --master-addr instead, outside of Kubernetes."
            )
        return None if "PET_MASTER_ADDR" in os.environ else LOOPBACK
    address = args.master_addr or (hosts[0].name if hosts else None)
    if address is None:
        if job.nodes == 1:
            return LOOPBACK
        raise ConfigError(
            f"--nodes is {job.nodes} and nothing says where they meet; expected --hostfile, or --master-addr "
            "with an address of the first machine."
        )
    own = args.local_addr
    if own is None and hosts and rank is not None:
        own = hosts[rank].name
    return Meeting(
        address=address,
        hosts_it=None if rank is None else rank == 0,
        own_address=own,
        **_given(port=args.master_port, identity=args.rendezvous_id),
    )


def _commands(args: argparse.Namespace, job: LaunchJob, hosts: list[Host]) -> list[str]:
    if not hosts:
        return [_line(job, _meeting(args, job, hosts, _rank(args, hosts)))]
    lines = []
    for rank, host in enumerate(hosts):
        lines += [f"# on {host.name}", _line(job, _meeting(args, job, hosts, rank))]
    return lines


def _line(job: LaunchJob, meeting: Meeting | None) -> str:
    words = torchrun_command(job, meeting)
    variables = [f"{name}={value}" for name, value in job.variables().items()]
    return shlex.join(["env", *variables, *words] if variables else words)


def _start(
    job: LaunchJob, meeting: Meeting | None, config: TrainingConfig, *, when_terminated: int = 0
) -> int:
    from mt_megatron.data.loader.shared_memory import shared_memory_problem
    from mt_megatron.launching.jobs.supervise import supervise
    from mt_megatron.scan.respond.straggler_policy import EXIT_CODE

    if config.launch.print_config:
        print(config.to_yaml(), end="")
        return 0
    if config.launch.check_memory and (line := shared_memory_problem(config, job.processes_per_node)):
        raise ConfigError(f"{line}; --no-check-memory starts all the same.")
    _check_start(config, alone=job.nodes == 1)
    _say(shlex.join(torchrun_command(job, meeting)))
    sys.stdout.flush()
    command = torchrun_command(job, meeting, "mt_megatron.launching.jobs.elastic")
    listed = _list_of_excluded(config)
    before = _content(listed)
    code = supervise(command, {**os.environ, **job.variables()}, when_terminated=when_terminated)
    # A machine whose processes torchrun ended has another code than the one that left.
    if code and _content(listed) != before:
        _say(f"a straggler's host is listed in {listed}; start again with --exclude-hosts {listed}")
        return EXIT_CODE
    return code


def _check_start(config: TrainingConfig, *, alone: bool) -> None:
    """Raise what every rank would: of the weights to start from, of a folder that another run saves to (where
    this machine is ``alone``: elsewhere that may be this run's own rank 0), of a package that is missing."""
    from mt_megatron.planning.validate.files import start_problems

    options = config.checkpoint
    if config.logging.wandb_project is not None and find_spec("wandb") is None:
        from mt_megatron.training.logging.wandb import MISSING

        raise ConfigError(MISSING)
    if problems := start_problems(config):
        raise ConfigError("\n".join(problems))
    # Not for a new run: torch takes seconds to import.
    named = options.load or options.init_from_hf or options.resume not in ("auto", "never")
    if named or (options.save is not None and Path(options.save).is_dir()):
        from mt_megatron.checkpoint.run_lock import require_free
        from mt_megatron.training.preflight import check_checkpoint

        try:
            if alone and options.save is not None:
                require_free(options)
            check_checkpoint(config)
        except CheckpointError as error:
            # Nothing was started: wrong use of launch, whatever it is to a rank.
            raise ConfigError(str(error)) from error


def _list_of_excluded(config: TrainingConfig) -> Path | None:
    # Not earlier: what only prints does without them.
    from mt_megatron.scan.format.run_files import run_files
    from mt_megatron.scan.respond.straggler_policy import excluded_path
    from mt_megatron.training.logging.metrics import metrics_path
    from mt_megatron.training.run_folder import run_folder

    folder = run_folder(config.scan.scan_dir, metrics_path(config))
    return None if folder is None or config.scan.scan == "off" else excluded_path(run_files(folder))


def _content(listed: Path | None) -> bytes:
    # None yet, or somebody else's: the run itself says what it could not list.
    with contextlib.suppress(OSError):
        return b"" if listed is None else listed.read_bytes()
    return b""


def _say(text: str) -> None:
    print(f"mt-megatron launch: {text}", file=sys.stderr)

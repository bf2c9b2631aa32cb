"""Every check that needs no process group; all problems are reported at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate.experts import expert_problems
from mt_megatron.planning.validate.files import checkpoint_problems, file_problems
from mt_megatron.planning.validate.fp8 import fp8_layer_problems
from mt_megatron.planning.validate.model import model_problems
from mt_megatron.planning.validate.parallel import parallel_problems
from mt_megatron.planning.validate.rampup import rampup_problems
from mt_megatron.planning.validate.supported import backend_problems, size_problems, support_problems
from mt_megatron.planning.validate.train import train_problems
from mt_megatron.scan.record.levels import LEVELS, Window
from mt_megatron.training.lab_file import lab_problems

_LARGEST_PORT = 65535
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?")


def scan_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    checks = (_idle, _window, _webhook, _port, _address, _leaving)
    return [problem for check in checks for problem in check(config)]


def _idle(config: TrainingConfig) -> list[str]:
    """Options that nothing would read."""
    scan = config.scan
    told = {
        "scan_webhook": scan.scan_webhook is not None,
        "scan_prometheus_port": scan.scan_prometheus_port is not None,
        "scan_on_straggler": scan.scan_on_straggler != "continue",
    }
    needs_scan = {
        "scan_window": scan.scan_window is not None,
        "scan_dir": scan.scan_dir is not None,
        "scan_group_readable": scan.scan_group_readable,
        **told,
    }
    found: list[str] = []
    for name, given in needs_scan.items():
        if given and scan.scan == "off":
            found.append(
                f"{name} is given and scan is off; expected at least base. Set --scan base, or leave "
                f"--{name.replace('_', '-')} out."
            )
    for name, given in told.items():
        if given and scan.scan != "off" and not scan.scan_alerts:
            found.append(
                f"{name} is given and scan_alerts is false; expected it, since nobody would look for "
                f"culprits. Set --scan-alerts, or leave --{name.replace('_', '-')} out."
            )
    return found


def _window(config: TrainingConfig) -> list[str]:
    text = config.scan.scan_window
    if text is None:
        return []
    try:
        window = Window.parse(text)
    except ConfigError as error:
        return [f"scan_window is {text!r}: {error}. Change --scan-window."]
    if LEVELS.index(window.level) <= LEVELS.index(config.scan.scan):
        return [
            f"scan_window asks for {window.level} and scan is {config.scan.scan} anyway; expected a higher "
            "level. Change --scan-window or --scan."
        ]
    return []


def _webhook(config: TrainingConfig) -> list[str]:
    url = config.scan.scan_webhook
    if url is None:
        return []
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname)
        right = right and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if right:
        return []
    return [f"scan_webhook is {url!r}; expected an address such as https://host/path. Set --scan-webhook."]


def _port(config: TrainingConfig) -> list[str]:
    port = config.scan.scan_prometheus_port
    if port is None or 0 <= port <= _LARGEST_PORT:
        return []
    return [
        f"scan_prometheus_port is {port}; expected 0 (any free one) to {_LARGEST_PORT}. Set "
        "--scan-prometheus-port."
    ]


def _address(config: TrainingConfig) -> list[str]:
    """Where Prometheus asks: an address of a machine, and names without ports."""
    scan = config.scan
    found: list[str] = []
    given = {
        "scan_prometheus_address": scan.scan_prometheus_address is not None,
        "scan_prometheus_hosts": bool(scan.scan_prometheus_hosts),
    }
    for name, there in given.items():
        if there and scan.scan_prometheus_port is None:
            found.append(
                f"{name} is given and scan_prometheus_port is not; expected a port, since nothing listens "
                f"without. Set --scan-prometheus-port, or leave --{name.replace('_', '-')} out."
            )
    address = scan.scan_prometheus_address
    if address is not None:
        try:
            ip_address(address)
        except ValueError:
            found.append(
                f"scan_prometheus_address is {address!r}; expected an IP address of rank 0's machine, such "
                "as 10.0.3.4, or 0.0.0.0 for all of them. Set --scan-prometheus-address."
            )
    for host in scan.scan_prometheus_hosts:
        if not _HOST.fullmatch(host):
            found.append(
                f"scan_prometheus_hosts has {host!r}; expected host names without a port, such as "
                "trainer.example. Set --scan-prometheus-hosts."
            )
    return found


def _leaving(config: TrainingConfig) -> list[str]:
    if config.scan.scan_on_straggler == "continue" or config.checkpoint.save is not None:
        return []
    return [
        (
            "scan_on_straggler is checkpoint-and-exit and save is not set; expected a directory to save to. "
            "Set --save."
        )
    ]


def scope_problems(config: TrainingConfig, *, packages: bool = True) -> list[str]:
    """One line per problem: found, expected, what to change. ``packages`` says whether those of the sinks
    have to be installed here."""
    scope, found = config.scope, []
    given = {
        "scope_watch": bool(scope.scope_watch),
        "scope_lab": scope.scope_lab is not None,
        "scope_dir": scope.scope_dir is not None,
        "scope_port": scope.scope_port != 0,
        "scope_sink": bool(scope.scope_sink),
    }
    for name, there in given.items():
        flag = name.replace("_", "-")
        if there and scope.scope == "off":
            found.append(
                f"{name} is given and scope is off; expected record or live. Set --scope live, or leave "
                f"--{flag} out."
            )
        elif there and name == "scope_port" and scope.scope != "live":
            found.append(
                "scope_port is given and scope is record, which serves no page; expected live. Set --scope "
                "live, or leave --scope-port out."
            )
    for name, value, unit in (
        ("scope_interval", scope.scope_interval, "steps"),
        ("scope_retain_mib", scope.scope_retain_mib, "MiB"),
        ("scan_retain_mib", config.scan.scan_retain_mib, "MiB"),
    ):
        if value < 1:
            found.append(f"{name} is {value}; expected at least 1 {unit}. Set --{name.replace('_', '-')}.")
    if not 0 <= scope.scope_port <= _LARGEST_PORT:
        found.append(
            f"scope_port is {scope.scope_port}; expected 0 (any free one) to {_LARGEST_PORT}. Set "
            "--scope-port."
        )
    if not scope.scope_pause_minutes > 0:  # NaN is none either.
        found.append(
            f"scope_pause_minutes is {scope.scope_pause_minutes:g}; expected more than 0, or a pause would "
            "end at once. Set --scope-pause-minutes."
        )
    if scope.scope_watch:
        # Not earlier: a run that asks for nothing need not load it.
        from mt_megatron.scope.watch.requests import parse_all

        _, refused = parse_all(scope.scope_watch)
        found += [f"scope_watch: {line}. Change --scope-watch." for line in refused]
    return found + _sink_problems(scope.scope_sink, packages)


def _sink_problems(texts: Sequence[str], packages: bool) -> list[str]:
    if not texts:
        return []
    from mt_megatron.scope.sidecar.sinks.base import SinkError, is_installed, parsed

    found = []
    names = []
    for text in texts:
        try:
            name, _ = parsed(text)
        except SinkError as error:
            found.append(f"scope_sink: {error}. Change --scope-sink.")
            continue
        names.append(name)
        if packages and not is_installed(name):
            found.append(
                f"scope_sink is {text}, and the package {name} is not installed; expected it. Install it "
                f'with `pip install "mt_megatron[{name}]"`, or leave --scope-sink out.'
            )
    found += [
        f"scope_sink has {name} {names.count(name)} times; expected each sink once. Change --scope-sink."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return found


def validate(config: TrainingConfig, *, world_size: int = 1, check_files: bool = True) -> None:
    """Check ``config`` for a run of ``world_size`` processes.

    ``check_files=False`` leaves out the existence of data, tokenizer, checkpoints and packages, for a
    configuration that is checked on another machine than the one it runs on.

    Raises ``ConfigError`` with one line per problem: found, expected, what to change.
    """
    found = problems(config, world_size=world_size, check_files=check_files)
    if found:
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        raise ConfigError(f"the configuration has {count}:\n" + "\n".join(f"- {line}" for line in found))


def problems(config: TrainingConfig, *, world_size: int = 1, check_files: bool = True) -> list[str]:
    """What ``validate`` would raise, one line per problem; empty when all is well."""
    too_large = size_problems(config)
    if too_large:
        # What follows computes with these numbers.
        return too_large
    return [
        *support_problems(config, packages=check_files),
        *model_problems(config),
        *parallel_problems(config, world_size),
        *expert_problems(config, world_size),
        *fp8_layer_problems(config),
        *train_problems(config),
        *checkpoint_problems(config),
        *rampup_problems(config, world_size),
        *scan_problems(config),
        *scope_problems(config, packages=check_files),
        *([*backend_problems(config), *file_problems(config)] if check_files else []),
        *lab_problems(config, world_size, must_exist=check_files),
    ]

"""What is recorded, and who is told: values that are none, and options that nothing would read."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.bad_input.cases import Case, Promise
from tests.bad_input.rules import promise, rule

TOLD: tuple[tuple[str, Any], ...] = (
    ("scan_webhook", "https://alerts.example/hook"),
    ("scan_prometheus_port", 9400),
    ("scan_on_straggler", "checkpoint-and-exit"),
)


@rule
def scan_options_without_scan(case: Case, rng: Random) -> Promise:
    case["scan"] = "off"
    name, value = rng.choice(
        [*TOLD, ("scan_window", "100:2:full"), ("scan_dir", "traces"), ("scan_group_readable", True)]
    )
    case[name] = value
    if name == "scan_on_straggler":
        case["save"] = "runs/a"
    return promise(name, "scan is off")


@rule
def a_trace_of_no_size(case: Case, rng: Random) -> Promise:
    case["scan_retain_mib"] = rng.choice([0, -1, -1024])
    return promise("scan_retain_mib", "expected at least 1 MiB")


@rule
def alerts_to_nobody(case: Case, rng: Random) -> Promise:
    case["scan_alerts"] = False
    name, value = rng.choice(TOLD)
    case[name] = value
    if name == "scan_on_straggler":
        case["save"] = "runs/a"
    return promise(name, "scan_alerts is false")


@rule
def windows_that_are_none(case: Case, rng: Random) -> Promise:
    case["scan_window"] = rng.choice(["often", "0:1:full", "10:11:full", "10:1:deep", "10:1:full:2", "10:-1"])
    return promise("scan_window", case["scan_window"])


@rule
def windows_that_change_nothing(case: Case, rng: Random) -> Promise:
    levels = [("full", "full"), ("full", "base"), ("kernel", "full"), ("base", "off")]
    case["scan"], level = rng.choice(levels)
    case["scan_window"] = f"100:1:{level}"
    return promise("scan_window", f"asks for {level}")


@rule
def addresses_that_are_none(case: Case, rng: Random) -> Promise:
    case["scan_webhook"] = rng.choice(
        ["alerts.example", "ftp://alerts.example", "https://", "http://[::1", "http://a:0/"]
    )
    return promise("scan_webhook", case["scan_webhook"])


@rule
def ports_that_are_none(case: Case, rng: Random) -> Promise:
    case["scan_prometheus_port"] = rng.choice([-1, 65536, 10**9])
    return promise("scan_prometheus_port", case["scan_prometheus_port"])


@rule
def prometheus_without_a_port(case: Case, rng: Random) -> Promise:
    name, value = rng.choice(
        [("scan_prometheus_address", "0.0.0.0"), ("scan_prometheus_hosts", ["trainer.example"])]
    )
    case[name] = value
    return promise(name, "scan_prometheus_port is not", "--scan-prometheus-port")


@rule
def prometheus_at_no_address(case: Case, rng: Random) -> Promise:
    case["scan_prometheus_port"] = 9400
    case["scan_prometheus_address"] = rng.choice(["trainer", "10.0.3", "10.0.3.4:9400", "[::1]", ""])
    return promise("scan_prometheus_address", case["scan_prometheus_address"])


@rule
def prometheus_hosts_that_are_none(case: Case, rng: Random) -> Promise:
    case["scan_prometheus_port"] = 9400
    case["scan_prometheus_hosts"] = [rng.choice(["a:9400", "*", "http://a", "-a", "a b", ""])]
    return promise("scan_prometheus_hosts", case["scan_prometheus_hosts"][0])


@rule
def leaving_without_a_checkpoint(case: Case, rng: Random) -> Promise:
    case["scan_on_straggler"] = "checkpoint-and-exit"
    return promise("scan_on_straggler", "save is not set", "--save")

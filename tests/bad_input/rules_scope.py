"""What is watched inside the model: requests that are none, and options that nothing would read."""

from __future__ import annotations

from random import Random

from tests.bad_input.cases import Case, Promise
from tests.bad_input.rules import promise, rule


@rule
def scope_options_without_scope(case: Case, rng: Random) -> Promise:
    case["scope"] = "off"
    name, value = rng.choice(
        [
            ("scope_watch", ["mlp@decoder.layers.0"]),
            ("scope_lab", "lab.yaml"),
            ("scope_dir", "watched"),
            ("scope_port", 9000),
            ("scope_sink", ["tensorboard"]),
        ]
    )
    case[name] = value
    return promise(name, "scope is off")


@rule
def a_page_that_is_not_served(case: Case, rng: Random) -> Promise:
    case["scope"], case["scope_port"] = "record", 9000
    return promise("scope_port", "serves no page")


@rule
def scope_numbers_that_are_too_small(case: Case, rng: Random) -> Promise:
    name = rng.choice(["scope_interval", "scope_retain_mib"])
    case[name] = rng.choice([0, -1, -20])
    return promise(name, "expected at least 1")


@rule
def ports_of_the_page_that_are_none(case: Case, rng: Random) -> Promise:
    case["scope_port"] = rng.choice([-1, 65536, 10**9])
    return promise("scope_port", "65535")


@rule
def sinks_that_are_none(case: Case, rng: Random) -> Promise:
    case["scope_sink"] = [rng.choice(["influx", "tensorboard:", "wandb project", "Tensorboard", ":x", ""])]
    return promise("scope_sink", "expected tensorboard[:FOLDER]")


@rule
def sinks_that_come_twice(case: Case, rng: Random) -> Promise:
    case["scope_sink"] = ["tensorboard", rng.choice(["tensorboard", "tensorboard:other"])]
    return promise("scope_sink", "expected each sink once")


@rule
def pauses_that_would_not_last(case: Case, rng: Random) -> Promise:
    case["scope_pause_minutes"] = rng.choice([0.0, -0.5, -30.0])
    return promise("scope_pause_minutes", "more than 0")


@rule
def requests_that_are_none(case: Case, rng: Random) -> Promise:
    case["scope_watch"] = [
        rng.choice(
            [
                "decoder.layers.0",
                "everything@decoder",
                "mlp@",
                "mlp@decoder.layers.0:heads",
                "mlp@decoder.layers.0:tokens=9-3",
                "mlp@decoder.layers.0:every=0",
                "mlp@decoder.layers.0:every=1:every=2",
                "mlp@../../etc",
                "attention@decoder.layers.0:heads=0-99999",
            ]
        )
    ]
    return promise("scope_watch", case["scope_watch"][0][:20])

"""`scan selftest` and `scan confirm` on the emulated musa device."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks

pytestmark = needs_emulated_musa()


@functools.cache
def measured() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(3, "tests.scan.respond.musa_ranks:measured", folder, timeout=240, env=environment())
        return found, json.loads((Path(folder) / "selftest.json").read_text())


def test_the_selftest_measures_every_rank_and_pair() -> None:
    found, written = measured()
    assert len({each["code"] for each in found}) == 1, "one exit code on all ranks"
    assert found[0]["code"] == int(bool(written["outliers"]))
    assert "3 ranks on 1 host" in found[0]["said"] and "3 links" in found[0]["said"]
    assert found[1]["said"] == "" == found[2]["said"], "one of them speaks"
    assert all(len(rates) == 3 and min(rates) > 0 for rates in written["rates"].values())
    assert [(link["first"], link["second"]) for link in written["links"]] == [(1, 2), (0, 2), (0, 1)]
    assert len(set(written["hosts"])) == 1 and written["hosts"][0].isprintable()


def test_a_slow_rank_and_a_slow_link_are_confirmed_and_no_others() -> None:
    for each in measured()[0]:
        assert each["device"].startswith("musa") and each["text"] == "äöü"
        assert each["compute (1,)"]["verdict"] == "confirmed" and each["compute (1,)"]["ratio"] > 1.5
        assert each["compute (0,)"]["verdict"] == "refuted"
        assert each["link (0, 2)"]["verdict"] == "confirmed"
        assert each["link (0, 1)"]["verdict"] == "refuted"


def test_a_job_that_is_asked_measures_between_two_steps() -> None:
    for each in measured()[0]:
        (answer,) = each["asked"]
        assert (answer["identity"], answer["verdict"]) == ("asked", "confirmed")

"""What is below the bar of a claim, or names every rank, accuses nobody: in no output and no exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mt_megatron.cli.main import main
from mt_megatron.scan.analysis.step_table import StepTable
from mt_megatron.scan.clock.fit import Clocks
from mt_megatron.scan.diagnose.late_arrival.own_work import slow_ranks
from mt_megatron.scan.diagnose.late_arrival.passing import without_passing
from mt_megatron.scan.diagnose.late_arrival.stages import slow_stages
from mt_megatron.scan.diagnose.merge_findings import merged
from mt_megatron.scan.diagnose.run import Diagnoser, Diagnosis, naming_no_rank, without_echoes
from mt_megatron.scan.findings.finding import SURE, Finding
from mt_megatron.scan.findings.text import headline, next_step, weak_signal
from mt_megatron.scan.format.recording_end import Ending
from mt_megatron.scan.format.run_files import run_files
from mt_megatron.scan.monitor import alert_policy, alerts
from mt_megatron.scan.report.gather import write_report
from mt_megatron.scan.respond import straggler_policy
from tests.scan.handmade import HandmadeRun, write_handmade

from .step_tables import MS, table

ONE = Finding(
    cause="slow_compute",
    lateness="late_arrival",
    ranks=(1,),
    host="node-1",
    first_step=12,
    last_step=30,
    lost_fraction=0.2,
    confidence=0.9,
    evidence=("own work is slow",),
)
WEAK = replace(ONE, cause="unknown", confidence=0.32, first_step=2, last_step=9)
ALL_WEAK = replace(WEAK, ranks=(), host="node-1", details={"whole_run": True})


def close(run: Path) -> None:
    """All recorders of the hand-made run end in good order."""
    for folder in (run / "scan").glob("rank-*"):
        ending = Ending(folder, 0)
        ending.say("closed", "", 30)


def found(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """The diagnosis of whatever run says ``findings``."""

    def diagnosed(*_: object, **__: object) -> Diagnosis:
        return Diagnosis(findings=findings, steps=tuple(range(1, 31)), ranks=(0, 1, 2, 3))

    monkeypatch.setattr("mt_megatron.scan.report.gather.diagnose", diagnosed)
    monkeypatch.setattr("mt_megatron.scan.monitor.status.diagnose", diagnosed)


def test_full_queues_lead_away_from_the_storage() -> None:
    data = replace(ALL_WEAK, cause="slow_data")
    assert "these were ready: look what else takes the host's processors" in next_step(data)


def test_weak_findings_are_folded_away_in_every_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=30))
    found(monkeypatch, WEAK, ALL_WEAK)
    assert main(["scan", "report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    line = "The whole run was slower in steps 2-9; no single rank"
    assert "No culprit found" in text and line in text.split("Weak signals (2)")[1]
    folder = tmp_path / "scan" / "report"
    html = (folder / "report.html").read_text()
    assert 'class="card unsure"' not in html and 'class="card fine"' in html
    assert line in html.split("<summary>Weak signals (2)</summary>")[1].split("</details>")[0]
    folded = (folder / "report.md").read_text().split("<summary>Weak signals (2)</summary>")[1]
    assert line in folded.split("</details>")[0]
    said = json.loads((folder / "report.json").read_text())
    assert said["findings"] == [] and said["verdicts"] == {}
    assert [each["ranks"] for each in said["weak_signals"]] == [[1], []]


def test_a_claim_stands_alone_above_the_weak_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=30))
    found(monkeypatch, WEAK, ONE)
    files = write_report(tmp_path)
    assert (files.data.findings, files.data.weak_signals) == ((ONE,), (WEAK,))
    assert files.html.read_text().count('class="card') == 1


@pytest.mark.parametrize("findings", [(), (WEAK,), (ONE,), (WEAK, ONE)])
def test_status_of_an_ended_run_and_report_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: tuple[Finding, ...]
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=30))
    close(tmp_path)
    found(monkeypatch, *findings)
    codes = [main(["scan", action, str(tmp_path)]) for action in ("status", "report")]
    assert codes == [int(ONE in findings)] * 2


def test_both_say_what_the_watcher_named_and_all_steps_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=30))
    close(tmp_path)
    run_files(tmp_path).findings.write_text(json.dumps(ONE.to_dict()) + "\n")
    found(monkeypatch)
    assert main(["scan", "status", str(tmp_path)]) == 0
    named = "the watcher named: Rank 1 (node-1) computes slowly"
    assert named in capsys.readouterr().out
    assert any(named in note for note in write_report(tmp_path).data.notes)
    found(monkeypatch, ONE)
    assert main(["scan", "status", str(tmp_path)]) == 1
    assert "the watcher named" not in capsys.readouterr().out


def test_one_bar_for_report_alert_and_measurement() -> None:
    assert replace(ONE, confidence=SURE).is_claim and not replace(ONE, confidence=SURE - 0.01).is_claim
    assert alerts.SURE is straggler_policy.SURE is SURE and alert_policy.WORTH_AN_ALERT > SURE


def test_what_names_all_ranks_names_none() -> None:
    everybody = replace(ONE, ranks=(0, 1, 2, 3))
    (said,) = naming_no_rank([everybody], range(4))
    assert said.ranks == () and said.whole_run and (said.cause, said.confidence) == ("slow_compute", 0.9)
    assert headline(replace(said, host=None)) == (
        "The whole run computes slowly in steps 12-30; no single rank"
    )
    link = replace(ONE, cause="slow_link", lateness="slow_transfer", ranks=(0, 1))
    hang = replace(ONE, cause="hang", lateness="hang", ranks=(0, 1))
    # A link of two ranks is a place, a hang says where each of them stands, one of one is the culprit.
    kept = [link, hang, replace(ONE, ranks=(1,))]
    assert naming_no_rank(kept, range(2)) == kept
    alone = [replace(ONE, ranks=(0,))]
    assert naming_no_rank(alone, range(1)) == alone


def test_a_slow_rank_explains_that_the_whole_run_was_slower() -> None:
    echo = replace(ALL_WEAK, first_step=11, last_step=20)
    elsewhere = replace(ALL_WEAK, first_step=1, last_step=11)
    assert without_echoes([ONE, echo, elsewhere]) == [ONE, elsewhere]
    assert without_echoes([replace(ONE, confidence=0.4), echo])[1:] == [echo]
    assert without_echoes([replace(echo, lost_fraction=0.0)]) == []


def raise_all(column: str, milliseconds: float) -> Callable[[int], list[Finding]]:
    def judge(seed: int) -> list[Finding]:
        steps = table(dp=2, steps=60, seed=seed, host=lambda _: 0)
        steps.columns["compute"][:, 20:40] += milliseconds * MS
        steps.columns["step"][:, 20:40] += milliseconds * MS
        steps.columns[column][:, 20:40] += milliseconds * MS
        return naming_no_rank(slow_stages(steps, []), steps.ranks)

    return judge


def test_a_quota_of_the_whole_host_is_claimed_and_blames_no_rank() -> None:
    (said,) = raise_all("throttled_ns", 40.0)(3)
    assert said.is_claim and said.cause == "host_contention"
    assert said.ranks == () and said.whole_run and said.host == "host0"
    assert headline(said).startswith("The whole run on host0 waits for processors in steps ")
    assert "quota" in next_step(said)
    (waits,) = raise_all("run_queue_wait_ns", 40.0)(3)
    assert not waits.is_claim and waits.whole_run


def test_evidence_says_of_which_steps_it_is() -> None:
    (said,) = raise_all("throttled_ns", 40.0)(3)
    assert "of all ranks takes" in said.evidence[0]
    assert said.evidence[1].startswith("rank 0: its quota")
    two = [
        replace(ONE, evidence=("58.5 % more",)),
        replace(ONE, evidence=("10.5 % more",), first_step=40, last_step=50, confidence=0.8),
    ]
    (joined,) = merged(two)
    assert joined.evidence == ("in steps 12-30: 58.5 % more", "in steps 40-50: 10.5 % more")
    assert joined.details["stretches"] == [[12, 30], [40, 50]]
    everybody = replace(joined, ranks=(), details={**joined.details, "whole_run": True})
    assert "The whole run was slower in 2 stretches of steps 12-50; no single rank" in weak_signal(everybody)
    assert merged([joined, two[0]])[0].details["stretches"] == [[12, 30], [40, 50]]
    (joined,) = merged([ONE, ONE])
    assert joined.evidence == ONE.evidence


def shared(steps: int = 640) -> StepTable:
    """Two ranks that compute on the processors of one host."""
    made = table(dp=2, steps=steps, deviation=0.02, host=lambda _: 0)
    made.columns["on_host"] = np.ones_like(made.columns["compute"])
    return made


def slowed(factor: float, last: int) -> Finding:
    """What is found of rank 0, whose work takes ``factor`` times as long from step 401 to ``last``."""
    made = shared()
    made.columns["compute"][0, 400:last] *= factor
    made.columns["process_cpu_ns"] = made.columns["compute"].copy()
    made.columns["step"] += made.columns["compute"].max(axis=0) - 100.0 * MS
    (one,) = [each for each in without_passing(slow_ranks(made), made) if each.ranks == (0,)]
    assert one.cause == "slow_compute"
    return one


def test_work_on_shared_processors_that_was_slow_for_a_moment_is_no_claim() -> None:
    brief = slowed(1.2, 412)
    assert not brief.is_claim and "another process" in brief.evidence[-1]
    # Slower than a neighbour makes it, for longer, or still so: nobody else's doing.
    for kept in (slowed(1.6, 412), slowed(1.2, 520), slowed(1.2, 640)):
        assert kept.confidence > 0.8 and not any("another process" in each for each in kept.evidence)


def test_a_wait_for_a_processor_passes_by_and_a_quota_or_a_device_does_not() -> None:
    waits = replace(ONE, cause="host_contention", ranks=(0,), first_step=60, last_step=65)
    quota = replace(waits, details={"shares": {"throttled": 0.9}})
    costly = replace(waits, first_step=100, last_step=400)
    late = replace(waits, first_step=636, last_step=640)
    link = replace(waits, cause="slow_link", lateness="slow_transfer", ranks=(0, 1))
    judged = without_passing([waits, quota, costly, late, link], shared())
    assert [each.is_claim for each in judged] == [False, True, True, True, True]
    on_devices = shared()
    on_devices.columns["on_host"][:] = 0.0
    assert without_passing([waits], on_devices) == [waits]


def test_advice_fits_a_run_that_has_ended_and_one_that_has_a_single_host() -> None:
    unsure = replace(ONE, cause="unknown")
    assert "scan level RUN full" in next_step(unsure)
    assert "scan level" not in next_step(unsure, run_ended=True)
    assert "restart without the host" in next_step(ONE)
    assert "without the host" not in next_step(ONE, one_host=True)
    hang = replace(ONE, cause="hang", lateness="hang")
    assert "py-spy" in next_step(hang) and "py-spy" not in next_step(hang, run_ended=True)


def test_the_report_knows_whether_the_run_has_ended(tmp_path: Path) -> None:
    write_handmade(tmp_path, HandmadeRun(steps=10))
    data = write_report(tmp_path).data
    assert not data.run_ended and not data.one_host
    close(tmp_path)
    assert write_report(tmp_path).data.run_ended


def test_a_weak_signal_in_a_line() -> None:
    assert weak_signal(WEAK) == (
        "Rank 1 (node-1) may have been slow in steps 2-9 (20.0 % of their time; confidence 0.32)"
    )


def diagnosed(monkeypatch: pytest.MonkeyPatch, steps: StepTable) -> tuple[Finding, ...]:
    """What a diagnosis of ``steps`` says, without communication."""
    monkeypatch.setattr(Diagnoser, "table", lambda *_: steps)
    return Diagnoser(steps.places, Clocks(reference=0)).findings()


def test_the_diagnosis_of_a_healthy_run_on_a_busy_host_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ranks are slower for a while, and one of them for a moment more."""
    steps = shared()
    steps.columns["compute"][0, 400:412] *= 1.2
    steps.columns["compute"][:, 200:240] *= 1.3
    steps.columns["step"] += steps.columns["compute"].max(axis=0) - 100.0 * MS
    found = diagnosed(monkeypatch, steps)
    assert {each.ranks for each in found} == {(0,), ()} and not any(each.is_claim for each in found)
    (whole,) = [each for each in found if each.whole_run]
    assert (whole.first_step, whole.last_step) == (201, 240) and whole.details["suspected"] != "unknown"


def test_the_diagnosis_names_one_of_two_ranks_and_no_echo_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = shared(steps=170)
    steps.columns["compute"][1, 100:] *= 1.5
    steps.columns["compute"][0, 100:] *= 1.15  # the other rank's neighbour
    steps.columns["step"] += steps.columns["compute"].max(axis=0) - 100.0 * MS
    (one,) = diagnosed(monkeypatch, steps)
    assert one.is_claim and one.ranks == (1,) and one.first_step in range(99, 104)

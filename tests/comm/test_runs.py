"""``--p2p-transport`` in a run and in a script that knows nothing of it: the same steps, resumed, refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.comm import kinds
from tests.launch import run_command, run_ranks
from tests.pipeline.execute.test_script import SCRIPT, run

HERE = "tests.pipeline.execute.trainer_ranks"
PLAIN = "--hidden-dropout 0 --attention-dropout 0 --eval-iters 1"
PP2 = f"{PLAIN} --pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --virtual-pipeline-model-parallel-size 2"
EXPERTS = (
    "--family mixtral --num-moe-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    four, two = f"{VPP2} --train-iters 4", f"{PP2} --train-iters 2"
    flags = {
        "collective": four,
        "shm": f"{four} --p2p-transport shm --save FOLDER/shm --exit-interval 2",
        "resumed": f"{four} --p2p-transport auto --save FOLDER/shm",
        "refused": f"{two} --p2p-transport rdma",
        "ours": f"{two} --p2p-transport auto --pipeline-schedule zb_h1",
        "upstream's": two,
    }
    folder = str(tmp_path_factory.mktemp("runs"))
    return run_ranks(2, f"{HERE}:runs", folder, flags, timeout=200)


def test_a_run_over_shared_memory_is_upstreams_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    """Saved in the middle and resumed under ``auto``; by our schedules as well."""
    found = ranks[0]
    failed = {name: each["error"] for name, each in found.items() if each["error"] and name != "refused"}
    assert failed == {}
    first, second = found["shm"]["steps"], found["resumed"]["steps"]
    assert sorted(first) == ["1", "2"] and sorted(second) == ["3", "4"]
    assert {**first, **second} == found["collective"]["steps"]
    assert found["resumed"]["valid"] == found["collective"]["valid"] != []
    assert found["ours"]["steps"] == found["upstream's"]["steps"]
    assert len(found["ours"]["steps"]) == 2
    carried = {name: found[name]["carried"] for name in ("collective", "shm", "resumed", "ours")}
    assert carried.pop("collective") == [{"collective": 1}]
    assert carried == dict.fromkeys(carried, [{"shm": 1}])


@pytest.mark.skipif(kinds.why_not("rdma") is None, reason="this machine has a verbs device")
def test_what_cannot_be_used_ends_all_ranks_before_training(ranks: list[dict[str, Any]]) -> None:
    errors = [each["refused"]["error"] for each in ranks]
    assert errors[0] == errors[1] and "found --p2p-transport rdma, which cannot be used here" in errors[0]
    # And what comes after it, in the same processes, trains.
    assert ranks[0]["ours"]["error"] is None


@pytest.mark.daily
def test_other_runs_are_upstreams_to_the_bit(tmp_path: Path) -> None:
    cases = {
        "experts": f"{VPP2} {EXPERTS}",
        "fp16": f"{PP2} --fp16 --initial-loss-scale 65536 --loss-scale-window 2",
        "distributed optimizer": f"{VPP2} --bf16 --use-distributed-optimizer --overlap-grad-reduce",
        "uneven stages": f"{PP2} --pipeline-model-parallel-layout 2,1,1,0",
    }
    flags = dict(cases)
    for name, given in cases.items():
        flags[f"{name} shm"] = f"{given} --p2p-transport shm"
    for found in run_ranks(2, f"{HERE}:runs", str(tmp_path), flags, timeout=300):
        assert {name: each["error"] for name, each in found.items() if each["error"]} == {}
        for name in cases:
            assert found[f"{name} shm"].pop("carried") != found[name].pop("carried")
            assert found[f"{name} shm"] == found[name], name


@pytest.mark.daily
def test_a_script_is_sent_over_shared_memory(tmp_path: Path) -> None:
    code, said, expected = run(tmp_path, [])
    assert code == 0 and len(expected) == 3 * 4 and "p2p transport" not in said, said[-3000:]
    code, said, losses = run(tmp_path, ["--p2p-transport", "auto", "--pipeline-schedule", "zb_h1"])
    assert code == 0 and losses == expected, said[-3000:]
    assert said.count("mt-megatron: p2p transport auto, neighbouring ranks: shm between 1") == 1
    code, said, losses = run(tmp_path, ["--p2p-transport", "rdma"])
    assert code != 0 and losses == []
    assert said.count("ConfigError: found --p2p-transport rdma, which cannot be used here") >= 2


def test_an_unknown_transport_starts_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mt_megatron.cli",
        "run",
        "--p2p-transport",
        "smh",
        "--",
        str(SCRIPT),
        "x",
    ]
    done = run_command(command, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "Did you mean shm?" in done.stderr

"""Grouped and sequential experts behind both dispatchers: every layout is one rank with all tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.patches.model.experts_ranks import MOE_FFN

HERE = "tests.patches.model.experts_ranks"
TOLERANCE = 5e-6


def cases(world: int) -> list[dict[str, Any]]:
    layouts = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 2), (1, 4)]}[world]
    found: list[dict[str, Any]] = [
        {"tp": tp, "ep": ep, "dispatcher": dispatcher, "grouped": grouped, "skew": skew}
        for tp, ep in layouts
        for dispatcher in ("alltoall", "allgather")
        for grouped in (True, False)
        for skew in ("even", "first")
    ]
    found += [{**found[0], "grouped": True, "dispatcher": d, "options": {"moe_layer_recompute": True}}
              for d in ("alltoall", "allgather")]  # fmt: skip
    if world > 1:
        # Only the alltoall dispatcher lets ranks bring different numbers of tokens.
        found += [{**found[0], "unequal": True, "grouped": grouped} for grouped in (True, False)]
    if world == 2:
        width = {"moe_ffn_hidden_size": None, "ffn_hidden_size": MOE_FFN, "perform_initialization": False}
        extended = {"dispatcher": "allgather", "options": {"moe_extended_tp": True, **width}}
        found += [{**found[0], **extended, "grouped": grouped} for grouped in (True, False)]
    found += [{**case, "swap": True} for case in found if case["skew"] == "even" and case["grouped"]][:2]
    assert sum(bool(case.get("swap")) for case in found) == 2
    return sorted(found, key=lambda case: (case["tp"], case["ep"]))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_is_one_rank_with_all_tokens(world: int) -> None:
    wanted = cases(world)
    ranks = run_ranks(world, f"{HERE}:compare_all", wanted, timeout=180)
    wrong = []
    for number, case in enumerate(wanted):
        for found in (rank[number] for rank in ranks):
            largest = max(found[name] for name in ("output", "input", "router", "weight1", "weight2"))
            if case.get("swap"):
                # The control: experts in another order are another layer.
                if found["output"] < 1e-2:
                    wrong.append(("not noticed", case, found))
            elif not largest <= TOLERANCE:
                wrong.append(("differs", case, found))
    assert not wrong, wrong


def test_one_rank() -> None:
    (found,) = run_ranks(1, f"{HERE}:one_rank")
    grouped, sequential = found["spec"]
    assert grouped.startswith("ConfigError: the configuration has moe_grouped_gemm=True")
    assert sequential.startswith("ConfigError: the layer specification was made for grouped experts")
    assert found["upstream_order"] == dict.fromkeys(("loaded", "own", "seeded", "attributes"), True)
    assert found["replaced"].startswith("MtMegatronError: the experts of an MoE layer did not take")
    assert found["accumulated"]["difference"] < 1e-6 and found["accumulated"]["size"] > 0.1

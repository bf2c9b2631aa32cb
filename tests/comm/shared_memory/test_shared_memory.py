"""Guarantees of the shared-memory transport, with and without the C helper."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

ROOM = "tests.comm.shared_memory"
NAMES = (
    "posting_waits_for_nobody",
    "eight_messages_are_in_flight",
    "edges_do_not_wait_for_each_other",
    "a_send_ends_though_nobody_waits",
    "slots_passed_over_count",
    "a_rank_that_never_connects_is_named",
    "leases_are_in_place",
    "help_leaves_leases_in_place",
    "leases_of_what_does_not_fit",
    "written_before_it_was_copied",
    "writes_elsewhere_are_none",
    "every_dtype_and_shape",
    "waits_have_limits",
    "wrong_messages_are_refused",
    "labels_arrive",
    "ends_are_clean",
    "an_abandoned_peer_says_so",
    "more_edges_later",
    "sizes_must_agree",
    "a_rank_without_memory_is_refused_by_both",
    "strangers_are_ignored",
)
SAYS: dict[str, Any] = {
    "a_rank_that_never_connects_is_named": lambda found: max(found.values()) < 15,
    "every_dtype_and_shape": lambda found: found > 100,
    "waits_have_limits": lambda found: (
        "message 0 from rank 1 (process" in found["receive"]
        and "did not come in 0.15 s" in found["receive"]
        and "did not come in 0.1 s" in found["lease"]
        and "rank 1 (process" in found["send"]
        and "1 message(s) wait" in found["send"]
    ),
    "wrong_messages_are_refused": lambda found: (
        "shape (2, 3) instead of (3, 2)" in found["shape"]
        and "torch.bfloat16 instead of torch.float16" in found["dtype"]
        and "direction=1) instead of Label(micro_batch=3" in found["label"]
        and "damaged on the way" in found["crc"]
        and "no message header" in found["header"]
        and "found out= of shape (3,)" in found["out"]
    ),
    "labels_arrive": lambda found: found == [5, 1, 1],
    "ends_are_clean": lambda found: (
        "is closed" in found["closed"]
        and "it closed its channels" in found["peer"]
        and "given up after an error" in found["abandoned"]
    ),
    "an_abandoned_peer_says_so": lambda found: "gave up its channels after an error" in found,
    "more_edges_later": lambda found: found == 5,
    "sizes_must_agree": lambda found: "'slots': 9" in found and "same configuration" in found,
    "a_rank_without_memory_is_refused_by_both": lambda found: (
        len(found) == 4
        and all("no memory today" in each for each in found)
        and all("rank 0 says" in each for each in found[2:])
    ),
    "strangers_are_ignored": lambda found: (
        # The rest of 0.1 s.
        "does not listen" in found[0] and "waited 0." in found[2] and "'place/1'" in found[2]
    ),
}
"""What a function's result must be; None without an entry."""

_found: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("name", NAMES)
def test_it_holds(name: str, helper: str) -> None:
    if helper not in _found:
        [_found[helper]] = run_ranks(
            1, "tests.comm.shared_memory.ranks:several", list(NAMES), helper, timeout=120
        )
    found = _found[helper][name]
    assert SAYS[name](found) if name in SAYS else found is None, found

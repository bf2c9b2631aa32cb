"""Configurations drawn at random, many of them wrong: converted with the same logits, or refused."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.published import FAMILIES
from tests.launch import run_ranks

SOAK = bool(os.environ.get("MT_MEGATRON_SOAK"))
FIRST, COUNT, COMMANDS = (3000, 200, 10) if SOAK else (0, 10, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configurations_are_converted_or_refused(
    family: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    [found] = run_ranks(
        1,
        "tests.convert.hf.drawn_configs:everything",
        str(tmp_path),
        family,
        FIRST,
        COUNT,
        COMMANDS,
        timeout=1500,
    )
    wrong = []
    for way in ("process", "command"):
        kinds = Counter(row[1] for row in found[way])
        for kind, count in sorted(kinds.items()):
            record_property(f"{way} {kind}", count)
        wrong += [(way, *row) for row in found[way] if not row[1].startswith(("converted", "refused"))]
    parity = [row[3] for row in found["process"] if row[1] == "converted"]
    record_property("largest difference of logits over the largest logit", f"{max(parity):.2g}")
    assert wrong == []
    assert parity and any(row[1].startswith("refused") for row in found["process"]), "both happen"
    assert [row[1] for row in found["spoiled"]] == ["different", "different"], "the comparison notices"

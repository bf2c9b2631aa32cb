"""The table of Moore Threads cards: found by their names and ids, and silent where nothing is known."""

from __future__ import annotations

import pytest

from mt_megatron.backends.musa import cards as musa_cards


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MTT S4000", "MTT S4000"),
        ("mtt-s4000", "MTT S4000"),
        ("Moore Threads MTT S80 16GB", "MTT S80"),
        ("MTT S80ES", "MTT S80"),
        ("MTT S5000", "MTT S5000"),
        ("MTT S40001", None),
        ("MTT S8", None),
        ("NVIDIA H100", None),
    ],
)
def test_a_card_is_known_by_its_name(name: str, expected: str | None) -> None:
    found = musa_cards.card(name)
    assert (found.name if found else None) == expected


def test_no_two_cards_share_a_pci_id() -> None:
    ids = [each for card in musa_cards.CARDS for each in card.device_ids]
    assert len(ids) == len(set(ids))
    assert musa_cards.card_of_pci(0x0222) is musa_cards.card("MTT S3000")
    assert musa_cards.card_of_pci(0xFFFF) is None


def test_capability_decides_about_number_formats() -> None:
    assert [musa_cards.native_bf16(each) for each in ((2, 1), (2, 2), (3, 1))] == [False, True, True]
    assert musa_cards.fp8_granularities((2, 2)) == ()
    assert musa_cards.fp8_granularities((3, 1)) == ("tensor", "row")


def test_an_unknown_peak_is_none() -> None:
    assert musa_cards.peak_flops("MTT S4000", "bfloat16") == 100e12
    assert musa_cards.peak_flops("MTT S4000", "float8_e4m3fn") is None
    assert musa_cards.peak_flops("MTT S5000", "bfloat16") is None
    assert musa_cards.peak_flops("somebody's card", "float32") is None


def test_what_a_card_can_do_is_said() -> None:
    s80, s4000 = (musa_cards.card(name) for name in ("MTT S80", "MTT S4000"))
    assert s80 is not None and s4000 is not None
    said = " ".join(musa_cards.abilities(s80.name, s80.capability, s80.mccl))
    assert "MCCL is not provided" in said and "no bf16" in said
    said = " ".join(musa_cards.abilities(s4000.name, s4000.capability, s4000.mccl))
    assert "capability 2.2" in said and "no FP8 GEMM" in said and "bf16 in hardware" in said
    assert "not in this version's table" in musa_cards.abilities("MTT X1", None, None)[0]


def test_what_the_press_reported_is_told_and_not_computed_with() -> None:
    told = musa_cards.reported("MTT S5000")
    assert told is not None and "80 GB" in told and "1.6 TB/s" in told and "784 GB/s" in told
    assert musa_cards.peak_flops("MTT S5000", "bfloat16") is None
    assert musa_cards.reported("MTT S4000") is None and musa_cards.reported("somebody's card") is None

"""What the emulator refuses because cards are reported to, and what takes its place."""

from __future__ import annotations

from tests.emulators import environment, needs_emulated_musa
from tests.launch import run_ranks

pytestmark = needs_emulated_musa()

EXPECTED = {
    "float64": ["a tensor made as float64", "float32 that becomes float64", "numpy's numbers"],
    "sort of bool": ["argsort of bool", "sort of bool"],
    "compiled code": ["torch.compile", "torch.jit.script"],
    "unequal sizes": ["all_gather", "all_to_all_single", "all_to_all", "reduce_scatter"],
}


def test_each_refusal_names_the_operator_and_what_to_do_and_is_counted() -> None:
    for found in run_ranks(2, "tests.backends.refusal_ranks:refused", env=environment()):
        assert found["counts"] == {kind: len(names) for kind, names in EXPECTED.items()}
        assert found["not refused"] == []
        for kind, names in EXPECTED.items():
            for name in names:
                text = found["messages"][name]
                assert "on musa: found " in text and "which cards are reported to refuse; " in text, kind
        assert "aten::" in found["messages"]["a tensor made as float64"]
        assert "float32" in found["messages"]["numpy's numbers"]
        assert "all_to_all_single" in found["messages"]["all_to_all_single"]


def test_the_backends_collectives_do_with_unequal_sizes_what_nccl_does() -> None:
    for found in run_ranks(2, "tests.backends.refusal_ranks:mended", env=environment()):
        assert found["wrong"] == []
        assert found["counts"] == {}

"""The tracer tells evaluated expressions from those a line merely contains."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.coverage_gate.points import list_points
from tests.coverage_gate.tracer import IMPORTS, Tracer

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the tracer reads CPython 3.11 bytecode positions"
)

SOURCE = """
import torch

def arms(first):
    return torch.device('cuda') if first else torch.device('cuda:1')

def short_circuit(x):
    return x and x.is_cuda

def folded(x):
    return x in ['torch.cuda.HalfTensor', 'torch.cuda.FloatTensor']

def spread(x):
    return (
        x
        .cuda(
            non_blocking=True,
        )
    )

def nested():
    return [make('cuda') for make in [torch.device]]

def message(bad):
    assert not bad, f'on {torch.cuda.is_available()}'
"""


class _Tensor:
    is_cuda = False

    def cuda(self, non_blocking: bool) -> _Tensor:
        return self


@pytest.fixture
def traced(tmp_path: Path) -> Any:
    """The module above, imported, and a function that calls into it and returns the texts recorded."""
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    points = list_points(tmp_path)
    tracer = Tracer(tmp_path, points)
    spec = importlib.util.spec_from_file_location("traced_module", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = {point.key: point.text for point in points}

    def record(call: Any) -> set[str]:
        before = sys.gettrace()
        tracer.records.clear()
        tracer.start()
        try:
            with tracer.named("one"):
                call(module)
        finally:
            tracer.stop()
            sys.settrace(before)
        assert not tracer.records.get(IMPORTS)
        return {texts[key] for key in tracer.records["one"]}

    return record


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda m: m.arms(True), {"'cuda'"}),
        (lambda m: m.arms(False), {"'cuda:1'"}),
        (lambda m: m.short_circuit(None), set()),
        (lambda m: m.short_circuit(_Tensor()), {"x.is_cuda"}),
        (lambda m: m.folded("x"), {"'torch.cuda.HalfTensor'", "'torch.cuda.FloatTensor'"}),
        (lambda m: m.spread(_Tensor()), {"x.cuda"}),
        (lambda m: m.nested(), {"'cuda'"}),
        (lambda m: m.message(False), set()),
    ],
)
def test_records_what_was_evaluated(traced: Any, call: Any, expected: set[str]) -> None:
    assert traced(call) == expected


def test_records_a_message_that_was_built(traced: Any) -> None:
    def call(module: ModuleType) -> None:
        with pytest.raises(AssertionError):
            module.message(True)

    assert traced(call) == {"torch.cuda.is_available"}


def test_records_other_threads(traced: Any) -> None:
    def call(module: ModuleType) -> None:
        thread = threading.Thread(target=module.arms, args=(True,))
        thread.start()
        thread.join()

    assert traced(call) == {"'cuda'"}

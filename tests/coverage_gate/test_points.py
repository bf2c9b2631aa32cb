"""The lister finds each kind of touch point, and sets mentions aside by rule."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.coverage_gate.points import ANNOTATION, DOCSTRING, MESSAGE, Point, points_of


def _points(source: str) -> list[Point]:
    return points_of(dedent(source), "m.py")


def _touch(source: str) -> list[tuple[str, str]]:
    return [(p.kind, p.text) for p in _points("import torch\n" + dedent(source)) if not p.set_aside]


_NOW = "torch.cuda.current_device"

FINDS: dict[str, list[tuple[str, str]]] = {
    "torch.cuda.synchronize()": [("torch.cuda", "torch.cuda.synchronize")],
    "torch.cuda.nvtx.range_pop()": [("torch.cuda", "torch.cuda.nvtx.range_pop")],
    "f = torch.cuda": [("torch.cuda", "torch.cuda")],
    "import torch as t\nt.cuda.Event()": [("torch.cuda", "t.cuda.Event")],
    "from torch import cuda\ncuda.Event()": [
        ("import", "from torch import cuda  [cuda]"),
        ("torch.cuda", "cuda.Event"),
    ],
    "from torch.cuda import device as d\nd(0)": [
        ("import", "from torch.cuda import device as d  [device]"),
        ("imported-name", "d"),
    ],
    "import torch.cuda.nvtx as n\nn.mark('x')": [
        ("import", "import torch.cuda.nvtx as n  [torch.cuda.nvtx]"),
        ("torch.cuda", "n.mark"),
    ],
    "x(device='cuda')": [("literal", "'cuda'")],
    "x('cuda:3')": [("literal", "'cuda:3'")],
    "x(f'cuda:{i}')": [("literal", "'cuda:'")],
    "x(f'rank:{i}/cuda')": [("literal", "'/cuda'")],
    "def f(d='cuda'): pass": [("literal", "'cuda'")],
    "y.cuda()": [("method", "y.cuda")],
    "map(y.cuda, z)": [("method", "y.cuda")],
    "y.to('cuda')": [("move", "y.to('cuda')"), ("literal", "'cuda'")],
    f"y.to(device={_NOW}())": [("move", f"y.to(device={_NOW}())"), ("torch.cuda", _NOW)],
    "x('nccl')": [("collective", "'nccl'")],
    "x('cpu:gloo,cuda:nccl')": [("collective", "'cpu:gloo,cuda:nccl'")],
    "torch.distributed.ProcessGroupNCCL.Options()": [
        ("collective", "torch.distributed.ProcessGroupNCCL.Options")
    ],
    "y.is_cuda": [("is_cuda", "y.is_cuda")],
    "y.type() == 'torch.cuda.HalfTensor'": [("tensor-type", "'torch.cuda.HalfTensor'")],
    "e['CUDA_DEVICE_MAX_CONNECTIONS']": [("environment", "'CUDA_DEVICE_MAX_CONNECTIONS'")],
    "from torch import _C\n_C._cuda_f()": [("torch._C", "_C._cuda_f")],
    "@torch.cuda.amp.custom_fwd\ndef f(): pass": [("torch.cuda", "torch.cuda.amp.custom_fwd")],
    "class A:\n    s: torch.cuda.Stream = None": [("torch.cuda", "torch.cuda.Stream")],
    "def f(x: torch.cuda.Event) -> torch.cuda.Event: pass": [("torch.cuda", "torch.cuda.Event")] * 2,
    "cuda_graph(use_cuda=1).cudagraph": [],
    "mine.cuda_stream": [],
}


@pytest.mark.parametrize("source", FINDS)
def test_finds(source: str) -> None:
    assert sorted(_touch(source)) == sorted(FINDS[source])


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('def f():\n    """Needs torch.cuda."""', DOCSTRING),
        ("def f():\n    x: List[torch.cuda.Event] = []", ANNOTATION),
        ("log('runs on cuda only')", MESSAGE),
        ("log(f'torch.cuda.synchronize took {t}')", MESSAGE),
        ("names = ['get_cuda_rng_tracker']", MESSAGE),
    ],
)
def test_sets_aside(source: str, rule: str) -> None:
    found = _points("import torch\n" + source)
    assert found and [p.set_aside for p in found] == [rule] * len(found)


def test_sets_postponed_annotations_aside() -> None:
    found = _points("from __future__ import annotations\nimport torch\ndef f(x: torch.cuda.Event): pass\n")
    assert [p.set_aside for p in found] == [ANNOTATION]


def test_a_key_survives_line_shifts_comments_and_layout() -> None:
    before = _points("import torch\ndef f():\n    a = torch.zeros(1, device='cuda')\n")
    after = _points(
        "# moved\n\n\nimport torch\ndef f():\n    # why\n"
        "    a = torch.zeros(\n        1,\n        device='cuda',\n    )\n"
    )
    assert [p.key for p in before] == [p.key for p in after]
    assert before[0].span != after[0].span


@pytest.mark.parametrize("changed", ["b = torch.zeros(1, device='cuda')", "a = torch.ones(1, device='cuda')"])
def test_a_key_changes_with_its_statement(changed: str) -> None:
    (before,) = _points("import torch\ndef f():\n    a = torch.zeros(1, device='cuda')\n")
    (after,) = _points(f"import torch\ndef f():\n    {changed}\n")
    assert before.key != after.key


def test_a_body_does_not_change_the_key_of_its_header() -> None:
    one = _points("import torch\nif torch.cuda.is_available():\n    pass\n")
    two = _points("import torch\nif torch.cuda.is_available():\n    x = 1\n")
    assert one[0].key == two[0].key


def test_like_statements_are_told_apart() -> None:
    source = "import torch\ndef f(a):\n    if a:\n        x = y.cuda()\n    else:\n        x = y.cuda()\n"
    keys = [p.key for p in _points(source)]
    assert len(keys) == len(set(keys)) == 2 and keys[1] == keys[0] + " #2"


def test_names_the_enclosing_scopes() -> None:
    source = (
        "class A:\n    def f(self):\n        g = lambda: y.cuda()\n"
        "        def h():\n            y.cuda()\ny.cuda()\n"
    )
    assert [p.qualname for p in _points(source)] == ["A.f.<lambda>", "A.f.h", "<module>"]

"""The choice of what computes products, and the adapter to DeepGEMM.

DeepGEMM itself is nowhere here: a module of ours stands in its place, which checks operands as DeepGEMM's
documentation and its checks of arguments describe them, and computes what it documents.
"""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mt_megatron import patched
from mt_megatron.config.parse import load_config
from mt_megatron.errors import ConfigError
from mt_megatron.fp8.checks import fp8_problems
from mt_megatron.fp8.deep_gemm_products import deep_gemm_nt
from mt_megatron.fp8.kernels import chosen, libraries
from mt_megatron.fp8.layers import layer_reason, run_recipe
from mt_megatron.fp8.linear import Fp8Linear
from mt_megatron.fp8.products import reference
from mt_megatron.fp8.quantise import Quantised
from mt_megatron.fp8.recipe import CONTRACTED, PRESETS
from mt_megatron.fp8.state import Fp8State, Options
from tests.emulators import environment, needs_emulated_musa
from tests.fp8.cases import MODEL
from tests.fp8.drawn import cases
from tests.fp8.test_products import cast, ulps
from tests.launch import run_ranks

BLOCKWISE = PRESETS["blockwise"]


@dataclass(frozen=True)
class Device:
    """What of a backend the choice depends on."""

    name: str
    granularities: tuple[str, ...] = ()

    def fp8_granularities(self) -> tuple[str, ...]:
        return self.granularities


CPU, MUSA = Device("cpu"), Device("musa", ("tensor", "row"))
CUDA = Device("cuda", ("tensor", "row"))


def in_place_of_deep_gemm(calls: list[tuple[int, int, int]]) -> ModuleType:
    module = ModuleType("deep_gemm")
    # As of an installed package, for find_spec.
    module.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)

    def decoded(codes: Tensor, scales: Tensor, rows: int) -> Tensor:
        assert codes.dtype is torch.float8_e4m3fn and codes.dim() == 2
        assert codes.stride(1) == 1 and codes.stride(0) % 16 == 0, "contiguous along k, for TMA"
        mn, k = codes.shape
        assert scales.dtype is torch.float32 and scales.shape == (-(-mn // rows), -(-k // 128))
        assert scales.is_contiguous() or scales.t().is_contiguous()
        spread = scales.repeat_interleave(rows, 0)[:mn].repeat_interleave(128, 1)[:, :k]
        return codes.float() * spread

    def fp8_gemm_nt(
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        c: Tensor | None = None,
        recipe: tuple[int, int, int] | None = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        recipe = recipe or (1, 128, 128)
        assert recipe in ((1, 128, 128), (1, 1, 128)) and d.is_contiguous()
        if recipe[1] == 128:
            assert c is None and d.dtype is torch.bfloat16
        else:
            assert c is not None and c.data_ptr() == d.data_ptr() and d.dtype is torch.float32
        product = decoded(*a, recipe[0]) @ decoded(*b, recipe[1]).t()
        assert product.shape == d.shape
        d.copy_(product if c is None else c + product)
        calls.append(recipe)

    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """A module that computes what DeepGEMM documents, and the recipes of its calls."""
    made: list[tuple[int, int, int]] = []
    monkeypatch.setitem(sys.modules, "deep_gemm", in_place_of_deep_gemm(made))
    return made


def test_products_are_the_references(calls: list[tuple[int, int, int]]) -> None:
    for index, (_, role, a, b) in enumerate(cases(BLOCKWISE, 60, seed=29)):
        qa, qb = cast(BLOCKWISE, role, a, b, seed=index)
        product = BLOCKWISE.product(role)

        def read(operand: Quantised, side: int, role: Any = role) -> Tensor:
            values = operand.values(torch.float32).double()
            # The first is [rows, summed], the second [summed, columns].
            return values if CONTRACTED[role][side] == 1 - side else values.t()

        found = deep_gemm_nt(role, qa, qb, product, torch.bfloat16)
        expected = reference(role, qa, qb, product, torch.bfloat16)
        assert found.shape == expected.shape
        assert ulps(found, expected, read(qa, 0), read(qb, 1)) <= 1, (role, a.shape, b.shape)
        assert calls[-1] == ((1, 1, 128) if role == "wgrad" else (1, 128, 128))
        for dtype in (torch.float32, torch.bfloat16):
            into = torch.zeros(found.shape, dtype=dtype)
            deep_gemm_nt(role, qa, qb, product, torch.bfloat16, out=into, accumulate=True)
            assert ulps(into.bfloat16(), found, read(qa, 0), read(qb, 1)) <= 1
            once = into.clone()
            deep_gemm_nt(role, qa, qb, product, torch.bfloat16, out=into, accumulate=True)
            assert torch.equal(into, 2 * once), "added to what was there"


def test_a_linear_computes_with_it(calls: list[tuple[int, int, int]]) -> None:
    import megatron.core  # noqa: F401 (before layers that are made for it)

    from mt_megatron.layers.linear import TensorParallelLinear

    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 272, generator=generator).bfloat16()
    x, grad = (torch.randn(40, n, generator=generator).bfloat16() for n in (272, 96))
    found = []
    for kernels in ("reference", "deep_gemm"):
        parameter = torch.nn.Parameter(weight.clone())
        state = Fp8State(BLOCKWISE, Options())
        state.kernels = kernels  # type: ignore[assignment]
        linear = Fp8Linear(state, "layers.0.linear", parameter)
        state.add(linear)
        parameter.gemm_recipe = linear  # type: ignore[attr-defined]
        inputs = x.clone().requires_grad_()
        output = TensorParallelLinear.apply(inputs, parameter, None, False, False, False, None, 0)  # type: ignore[no-untyped-call]
        output.backward(grad)
        found.append((output.detach(), inputs.grad, parameter.grad))
    assert calls == [(1, 128, 128), (1, 128, 128), (1, 1, 128)]
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert float((one.float() - other.float()).norm() / one.float().norm()) < 2e-3


def test_it_is_chosen_where_it_can_compute(
    calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    assert chosen("deep_gemm", "blockwise", CUDA, bf16=True) == "deep_gemm"
    assert libraries()["deep_gemm"] is True
    for name, device, bf16, says in (
        ("tensorwise", CUDA, True, "expected blockwise"),
        ("blockwise", MUSA, True, "expected cuda with compute capability 9 or 10"),
        ("blockwise", CPU, True, "on a cpu device"),
        ("blockwise", CUDA, False, "without bf16"),
    ):
        with pytest.raises(ConfigError, match=says):
            chosen("deep_gemm", name, device, bf16=bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(ConfigError, match="a card with compute capability 8.9"):
        chosen("deep_gemm", "blockwise", CUDA, bf16=True)


def test_it_is_refused_where_it_is_absent_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ConfigError, match="cannot be imported .*Install it"):
        chosen("deep_gemm", "blockwise", CUDA, bf16=True)
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    with pytest.raises(ConfigError, match="has no fp8_gemm_nt; expected version 2"):
        chosen("deep_gemm", "blockwise", CUDA, bf16=True)


def test_what_the_others_compute() -> None:
    for name in PRESETS:
        assert chosen("auto", name, CPU, bf16=True) == "reference"
        for device in (CPU, MUSA, Device("cuda")):
            assert chosen("reference", name, device, bf16=False) == "reference"
    assert chosen("auto", "rowwise", MUSA, bf16=True) == "scaled_mm"
    assert chosen("scaled_mm", "rowwise", CPU, bf16=True) == "scaled_mm"
    for name, device in (("blockwise", CPU), ("rowwise", Device("cuda", ("tensor",))), ("mxfp8", MUSA)):
        with pytest.raises(ConfigError, match=f"scaled_mm with fp8_recipe {name} on this {device.name}"):
            chosen("scaled_mm", name, device, bf16=True)
    with pytest.raises(ConfigError, match="--fp8-backend reference emulates every recipe"):
        chosen("auto", "blockwise", MUSA, bf16=True)


def test_a_run_says_what_computes_or_ends_before_it_begins(tmp_path: Path) -> None:
    flags = "--fp8-recipe tensorwise --fp8-backend"
    layouts = {name: f"{flags} {name}" for name in ("reference", "scaled_mm", "deep_gemm")}
    [found] = run_ranks(1, "tests.fp8.cases:trained", str(tmp_path), layouts, 3, timeout=120)
    assert "fp8_backend deep_gemm with fp8_recipe tensorwise" in found["deep_gemm"]["error"]
    assert found["scaled_mm"]["losses"] == pytest.approx(found["reference"]["losses"], rel=2e-3)
    argv = f"{MODEL} --lr 1e-3 --train-iters 2 --micro-batch-size 1 --bf16 {flags} deep_gemm".split()
    from mt_megatron.backends import registry
    from mt_megatron.training.preflight import check_before_start

    with pytest.raises(ConfigError, match="expected blockwise"):
        check_before_start(load_config(argv), registry.get("cpu"), 1)


@needs_emulated_musa()
@pytest.mark.daily
def test_the_reference_computes_any_recipe_on_a_device(tmp_path: Path) -> None:
    layouts = {"blockwise": "--fp8-recipe blockwise --fp8-backend reference"}
    [host] = run_ranks(1, "tests.fp8.cases:trained", str(tmp_path), layouts, 3, timeout=150)
    variables = {**environment("3.1"), "MT_MEGATRON_TEST_BACKEND": "musa"}
    [emulated] = run_ranks(
        1, "tests.fp8.cases:trained", str(tmp_path), layouts, 3, timeout=150, env=variables
    )
    assert emulated["blockwise"]["losses"] == pytest.approx(host["blockwise"]["losses"], rel=2e-3)


def test_values_are_checked() -> None:
    assert any("expected one of auto" in line for line in fp8_problems({"fp8_backend": "deepgemm"}))
    [te] = fp8_problems({"fp8_backend": "te", "fp8_recipe": "tensorwise"})
    assert "set transformer_impl transformer_engine with fp8 (--fp8-format)" in te
    assert any("without fp8_recipe" in line for line in fp8_problems({"fp8_backend": "deep_gemm"}))


def test_scales_per_row_need_bf16_on_cuda() -> None:
    cuda = Device("cuda", ("tensor", "row"))
    assert chosen("auto", "rowwise", cuda, bf16=True) == chosen("auto", "tensorwise", cuda, bf16=False)
    for backend in ("auto", "scaled_mm"):
        with pytest.raises(ConfigError, match="rowwise without bf16 on cuda; expected bf16"):
            chosen(backend, "rowwise", cuda, bf16=False)


@pytest.mark.parametrize("installed", [True, False])
def test_upstreams_format_is_delayed_scaling_of_ours(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine may be installed or not; its layers asked for by name are no recipe."""
    from mt_megatron.fp8.checkpoint import saved_recipe
    from mt_megatron.models.layer_spec import _obstacle
    from mt_megatron.patches.model import transformer_config as patch
    from mt_megatron.planning.build import transformer_config

    monkeypatch.setattr(patch, "find_spec", lambda name: object() if installed else None)
    for implementation, recipe in (("auto", "delayed"), ("local", "delayed"), ("transformer_engine", None)):
        argv = f"{MODEL} --bf16 --fp8-format hybrid --transformer-impl {implementation}"
        config = load_config(argv.split())
        assert run_recipe(config.model) == recipe
        told = {"fp8": "hybrid", "fp8_recipe": None, "transformer_impl": implementation}
        assert saved_recipe(told) == recipe
        says = _obstacle("cuda", config.model, False)
        assert ("fp8_recipe is set" in says) == (recipe is not None)
        if recipe is not None:
            with patched("cpu"):
                built = transformer_config(config)
            assert (built.fp8_recipe, built.fp8_recipe_format, built.fp8) == ("delayed", "hybrid", None)


def test_an_output_layer_in_fp8_defers_nothing() -> None:
    [line] = fp8_problems(
        {"fp8_recipe": "tensorwise", "fp8_output_layer": True, "defer_embedding_wgrad_compute": True}
    )
    assert "late weight gradients are computed in bf16; expected one of the two" in line


def test_depths_of_prediction_are_no_last_layers() -> None:
    fields = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers": 4}
    for last, reason in ((0, None), (1, "among the last 1 (num_layers_at_end_in_bf16)")):
        config = SimpleNamespace(**fields, num_layers_at_end_in_bf16=last)
        assert layer_reason(5, config) == layer_reason(4, config) == reason


def test_transformer_engine_is_upstreams_own_path_and_must_be_there() -> None:
    """Chosen by ``--transformer-impl``, as upstream does."""
    from mt_megatron.training.validate import validate

    if libraries()["transformer_engine"]:
        pytest.skip("it is installed here")
    argv = f"{MODEL} --lr 1e-3 --train-iters 2 --micro-batch-size 1 --transformer-impl transformer_engine"
    for more, says in (
        ("--fp8-format hybrid", "transformer_engine, which is not installed"),
        ("--fp8-recipe blockwise --fp8-backend reference", "expected local"),
    ):
        with pytest.raises(ConfigError, match=says):
            validate(load_config(f"{argv} {more}".split()), world_size=1)

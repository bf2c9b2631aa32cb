"""Each kind of change equals an independent computation to the bit, in every type; random numbers are
random."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab import random_numbers
from mt_megatron.scope.lab.specification import perturbation_from
from mt_megatron.scope.lab.values import Along, Places, Selection, changed, derivative, require_type
from tests.scope.lab import oracle

ENTRIES: list[dict[str, Any]] = [
    {"kind": "gaussian", "sigma": 0.37, "mean": 0.01},
    {"kind": "gaussian", "sigma": 0.37, "relative": True, "fraction": 0.5},
    {"kind": "uniform", "low": -0.125, "high": 1.7},
    {"kind": "uniform", "low": 0.1, "high": 0.3, "relative": True},
    {"kind": "mask", "fraction": 0.25},
    {"kind": "scale", "factor": 1.3},
    {"kind": "scale", "factor": -7e4, "fraction": 0.5},
    {"kind": "stuck", "value": 0.1, "fraction": 0.4},
    {"kind": "stuck", "value": "nan"},
    {"kind": "stuck", "value": 1e39, "fraction": 0.4},
    {"kind": "stuck", "value": -1e39, "fraction": 0.4},
    {"kind": "scale", "factor": 1e39, "fraction": 0.4},
]
_SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 3e38, 6e-8, 65504.0, 1.0]


def _values(name: str, count: int = 200) -> NDArray[Any]:
    drawn = np.random.default_rng(3).normal(size=count).astype(np.float32)
    drawn[: len(_SPECIAL)] = _SPECIAL
    with np.errstate(over="ignore"):
        return drawn.astype(oracle.DTYPES[name])


def _torch(values: NDArray[Any], name: str) -> torch.Tensor:
    bits = values.view(oracle.BITS[name]).view(f"int{oracle.WIDTH[name]}")
    return torch.from_numpy(bits.copy()).view(getattr(torch, name))


def _bits(tensor: torch.Tensor, name: str) -> NDArray[Any]:
    found: NDArray[Any] = tensor.view(getattr(torch, f"int{oracle.WIDTH[name]}")).numpy()
    return found.view(oracle.BITS[name])


def _same(ours: torch.Tensor, theirs: NDArray[Any], name: str) -> None:
    got, want = _bits(ours, name), theirs.view(oracle.BITS[name])
    # A NaN that arithmetic made has any payload; one that a bit flip made has its own.
    both_nan = np.isnan(theirs.astype(np.float64)) & ours.double().isnan().numpy()
    assert np.array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, want))


def _places(count: int) -> Places:
    # A shard: every third row of ten elements, far up in a large tensor.
    rows = torch.arange(count // 10) * 30 + 5_000_000_000
    return Places(parts=(rows, torch.arange(10)), shape=(1 << 40, 10))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['kind']}-{len(entry)}")
def test_equals_the_oracle(entry: dict[str, Any], name: str) -> None:
    one = perturbation_from({**entry, "on": "activation", "module": "*"})
    entry = {**entry, "value": float(entry["value"])} if "value" in entry else entry
    values, places, key = _values(name), _places(200), 0xFEDC_BA98_7654_3210
    ours = changed(_torch(values, name), places, Selection(share=one.fraction), one, key)
    theirs = oracle.perturbed(values, name, places.all().numpy(), entry, key)
    _same(ours, theirs, name)
    assert not np.array_equal(_bits(ours, name), values.view(oracle.BITS[name])), "something changed"


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_flips_every_bit(name: str) -> None:
    values, places = _values(name, 20), _places(20)
    for bit in range(oracle.WIDTH[name]):
        one = perturbation_from({"kind": "bit_flip", "bit": bit, "on": "weight", "module": "*"})
        ours = changed(_torch(values, name), places, Selection(), one, 1)
        theirs = oracle.perturbed(values, name, places.all().numpy(), {"kind": "bit_flip", "bit": bit}, 1)
        assert np.array_equal(_bits(ours, name), theirs.view(oracle.BITS[name])), bit
        again = changed(ours, places, Selection(), one, 1)
        assert np.array_equal(_bits(again, name), values.view(oracle.BITS[name])), bit


def test_a_bit_that_the_type_lacks_is_refused() -> None:
    one = perturbation_from({"kind": "bit_flip", "bit": 16, "on": "weight", "module": "*"})
    require_type(one, torch.float32, "w")
    with pytest.raises(ConfigError, match="bit: 16 for w of bfloat16; expected 0 .* to 15"):
        require_type(one, torch.bfloat16, "w")
    with pytest.raises(ConfigError, match="expected floating-point values"):
        require_type(one, torch.int64, "w")


def test_the_order_and_cut_of_elements_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    one = perturbation_from({"kind": "gaussian", "sigma": 1, "fraction": 0.5, "on": "weight", "module": "*"})
    whole = Places(parts=(torch.arange(8) * 6, torch.arange(6)), shape=(8, 6))
    values, selection = torch.randn(8, 6), Selection(share=one.fraction)
    expected = changed(values, whole, selection, one, 9)
    monkeypatch.setattr("mt_megatron.scope.lab.values._BLOCK", 12)
    assert torch.equal(changed(values, whole, selection, one, 9), expected)
    columns = Places(parts=(torch.arange(8) * 6, torch.tensor([4, 1])), shape=(8, 6))
    assert torch.equal(changed(values[:, [4, 1]], columns, selection, one, 9), expected[:, [4, 1]])


def test_chooses_places_and_coordinates() -> None:
    one = perturbation_from({"kind": "mask", "on": "weight", "module": "*"})
    places = Places(parts=(torch.arange(4) * 6, torch.arange(6)), shape=(4, 6))
    values = torch.ones(4, 6)
    by_index = changed(values, places, Selection(places=torch.tensor([8, 23])), one, 1)
    assert by_index.sum() == 22 and by_index[1, 2] == by_index[3, 5] == 0
    heads = torch.tensor([False, True, True, False, False, False])
    columns = changed(values, places, Selection(along=Along(stride=1, size=6, chosen=heads)), one, 1)
    assert torch.equal(columns, (~heads).float().expand(4, 6))
    rows = changed(values, places, Selection(along=Along(stride=6, size=4, chosen=heads[:4])), one, 1)
    assert torch.equal(rows, (~heads[:4]).float().unsqueeze(1).expand(4, 6))


@pytest.mark.parametrize(
    ("entry", "factor"),
    [({"kind": "mask"}, 0.0), ({"kind": "stuck", "value": 3}, 0.0), ({"kind": "scale", "factor": 2.5}, 2.5)],
)
def test_derivative_is_that_of_the_change(entry: dict[str, Any], factor: float) -> None:
    one = perturbation_from({**entry, "on": "activation", "module": "*", "differentiate": True})
    places = Places(parts=(torch.arange(12),), shape=(12,))
    selection = Selection(places=torch.tensor([3, 7]))
    expected = torch.ones(12)
    expected[[3, 7]] = factor
    assert torch.equal(derivative(torch.randn(12), places, selection, one, 1), expected)
    with_noise = perturbation_from(
        {"kind": "uniform", "low": 0, "high": 1, "relative": True, "on": "activation", "module": "*"}
    )
    values = torch.rand(12) + 1
    found = derivative(values, places, Selection(), with_noise, 1)
    torch.testing.assert_close(values * found, changed(values, places, Selection(), with_noise, 1))


def test_random_numbers_have_their_distributions() -> None:
    places = torch.arange(400_000) * 7 + 3
    normal = random_numbers.normal(random_numbers.key_of(1, "a"), places).double()
    assert abs(float(normal.mean())) < 5 / math.sqrt(400_000)
    assert abs(float(normal.var()) - 1) < 5 * math.sqrt(2 / 400_000)
    ordered = normal.sort().values
    at = torch.tensor([NormalDist().cdf(float(value)) for value in ordered[::400]])
    expected = torch.arange(0, 400_000, 400) / 400_000
    assert float((at - expected).abs().max()) < 1.95 / math.sqrt(400_000), "Kolmogorov and Smirnov, 0.1 %"
    uniform = random_numbers.uniform(random_numbers.key_of(1, "b"), places)
    counts = torch.histc(uniform, bins=100, min=0, max=1)
    assert float(((counts - 4000) ** 2 / 4000).sum()) < 148.2, "chi square, 99 degrees, 0.1 %"
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    share = random_numbers.drawn(random_numbers.key_of(1, "c"), places, 0.03).double().mean()
    assert abs(float(share) - 0.03) < 5 * math.sqrt(0.03 * 0.97 / 400_000)


def test_the_table_of_quantiles_is_rounded_right() -> None:
    start, rise, _ = random_numbers._table()
    for octave in range(0, random_numbers.OCTAVES, 3):
        for piece in range(0, random_numbers.SEGMENTS, 5):
            found = (start[octave * 256 + piece].item(), rise[octave * 256 + piece].item())
            assert found == tuple(map(float, oracle._piece(octave, piece))), (octave, piece)


def test_largest_and_smallest_tails_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, size in ((0, 6.2), (1 << 33, 6.2), ((1 << 64) - 1 - (1 << 64), 0.0)):
        monkeypatch.setattr(
            random_numbers, "bits", lambda key, places, bits=bits: torch.full_like(places, bits)
        )
        found = float(random_numbers.normal(1, torch.tensor([0])))
        assert abs(abs(found) - size) < 0.1 and math.isfinite(found)


def test_other_keys_and_words_draw_other_numbers() -> None:
    keys = {
        random_numbers.key_of(seed, name, step) for seed in (0, 1) for name in ("a", "b") for step in (1, 2)
    }
    assert len(keys) == 8
    drawn = torch.stack([random_numbers.bits(key, torch.arange(1000)) for key in sorted(keys)])
    assert len(drawn.flatten().unique()) == 8000

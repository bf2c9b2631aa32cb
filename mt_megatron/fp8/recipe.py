"""FP8 recipes as frozen data: what each of a linear's three products is computed from.

Sources: Transformer Engine's recipes of the same names (``delayed``, ``blockwise``, ``mxfp8``, ``nvfp4``),
torchao's ``tensorwise``, ``rowwise`` and ``rowwise_gw_hp``, section 3.3 of DeepSeek-V3's report
(arXiv:2412.19437) and "Pretraining Large Language Models with NVFP4" (arXiv:2509.25149). Imports neither
torch nor Megatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint

Kind = Literal["input", "weight", "grad"]
"""A linear's operands: its input x, its weight w and the gradient of its output."""

Role = Literal["fprop", "dgrad", "wgrad"]

AmaxGroup = Literal["tp-cp-dp", "tp-cp"]
"""All ranks of a pipeline stage, or those with the same samples (tensor and context parallel)."""

ROLES: tuple[Role, ...] = ("fprop", "dgrad", "wgrad")

OPERANDS: Mapping[Role, tuple[Kind, Kind]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad", "weight"),
    "wgrad": ("grad", "input"),
}
"""Operands ``a`` and ``b`` of each product, as ``seams.gemm`` passes them."""

CONTRACTED: Mapping[Role, tuple[int, int]] = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}
"""The dimension of ``a`` and of ``b`` that the product sums over."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand of one product is quantised."""

    format: Literal["e4m3", "e5m2", "e2m1", "bf16"]
    """``bf16``: it is not."""

    granularity: Literal["tensor", "row", "block"] = "tensor"
    """What shares a scale: the tensor; a row, along the dimension that the product sums over; a block."""

    block: tuple[int, int] = (0, 0)
    """Elements of a block: across and along the dimension that the product sums over."""

    power_of_2: bool = False
    """Whether scales are powers of two, rounded so that nothing saturates."""

    block_scale: Literal["fp32", "e8m0", "e4m3"] = "fp32"
    """What a block's scale is stored as. e4m3 scales have a second one, fp32, for the whole tensor."""

    stochastic: bool = False
    """Whether values are rounded stochastically, with seeded draws."""

    hadamard: int = 0
    """Width of the Hadamard rotation along the summed dimension before the cast; 0: none."""

    @property
    def quantised(self) -> bool:
        return self.format != "bf16"

    @property
    def text(self) -> str:
        """One phrase for reports."""
        if not self.quantised:
            return "bf16"
        what = {"tensor": "per tensor", "row": "per row", "block": "x".join(map(str, self.block))}
        extra = [
            word
            for word, on in (
                ("power-of-2 scales", self.power_of_2 and self.block_scale == "fp32"),
                (f"{self.block_scale.upper()} scales", self.block_scale != "fp32"),
                ("stochastic rounding", self.stochastic),
                (f"Hadamard {self.hadamard}", self.hadamard > 0),
            )
            if on
        ]
        return ", ".join([f"{self.format} {what[self.granularity]}", *extra])


BF16 = Cast(format="bf16")


@dataclass(frozen=True, kw_only=True)
class Product:
    """How one product is computed."""

    a: Cast
    b: Cast
    fast_accumulate: bool = False
    """Whether the device may keep partial sums in less than fp32. Slower and exact: False."""

    @property
    def quantised(self) -> bool:
        return self.a.quantised and self.b.quantised


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the linears of decoder layers compute in FP8."""

    name: str
    fprop: Product
    dgrad: Product
    wgrad: Product

    scaling: Literal["current", "delayed"] = "current"
    """``current``: scales from the tensor itself. ``delayed``: from its largest magnitudes of the last
    steps, so that no pass over the tensor comes before its cast."""

    history: int = 0
    """Delayed: steps that are remembered."""

    margin: int = 0
    """Delayed: scales are smaller by so many powers of two than what would just fit."""

    algorithm: Literal["max", "most_recent"] = "max"
    """Delayed: the history's largest entry, or its newest."""

    amax_group: AmaxGroup = "tp-cp-dp"
    """Delayed: which ranks of a pipeline stage share histories and scales."""

    promotion: int = 0
    """Partial sums are promoted to fp32 after so many elements of the summed dimension; 0: the device's
    accumulator."""

    source: str = ""
    """Who else has the recipe under this name."""

    def product(self, role: Role) -> Product:
        found: Product = getattr(self, role)
        return found

    def cast(self, role: Role, kind: Kind) -> Cast:
        """How ``kind`` is cast for ``role``."""
        product = self.product(role)
        return product.a if OPERANDS[role][0] == kind else product.b

    @property
    def shares_input_codes(self) -> bool:
        """Whether fprop and wgrad use the same codes of the input."""
        return _same_codes(self.cast("fprop", "input"), self.cast("wgrad", "input"))

    @property
    def shares_grad_codes(self) -> bool:
        """Whether dgrad and wgrad use the same codes of the output's gradient."""
        return _same_codes(self.cast("dgrad", "grad"), self.cast("wgrad", "grad"))

    @property
    def shares_weight_codes(self) -> bool:
        """Whether fprop and dgrad use the same codes of the weight, in two layouts."""
        return _same_codes(self.cast("fprop", "weight"), self.cast("dgrad", "weight"))

    @property
    def row_multiple(self) -> int:
        """Token dimensions are padded to a multiple of this where they are summed over."""
        return max(16, *(self.wgrad.a.block[1], self.wgrad.b.block[1]))


def _same_codes(one: Cast, other: Cast) -> bool:
    """Whether the casts agree although the products sum over different dimensions."""
    square = one.block[0] == one.block[1]
    return one == other and one.quantised and one.granularity != "row" and square and not one.hadamard


def _tensor(fmt: Literal["e4m3", "e5m2"]) -> Cast:
    return Cast(format=fmt)


_E4M3, _E5M2 = _tensor("e4m3"), _tensor("e5m2")
_ROW = Cast(format="e4m3", granularity="row", power_of_2=True)
_ROW_WEIGHT = Cast(format="e4m3", power_of_2=True)
_TILE = Cast(format="e4m3", granularity="block", block=(1, 128), power_of_2=True)
_SQUARE = Cast(format="e4m3", granularity="block", block=(128, 128), power_of_2=True)
_MX = Cast(format="e4m3", granularity="block", block=(1, 32), power_of_2=True, block_scale="e8m0")
_NV = Cast(format="e2m1", granularity="block", block=(1, 16), block_scale="e4m3")
_NV_SQUARE = dataclasses.replace(_NV, block=(16, 16))
_NV_GRAD = dataclasses.replace(_NV, stochastic=True)

PRESETS: Mapping[str, Recipe] = {
    each.name: each
    for each in (
        Recipe(
            name="delayed",
            fprop=Product(a=_E4M3, b=_E4M3, fast_accumulate=True),
            dgrad=Product(a=_E5M2, b=_E4M3),
            wgrad=Product(a=_E5M2, b=_E4M3),
            scaling="delayed",
            history=1,
            algorithm="most_recent",
            source="Transformer Engine DelayedScaling, HYBRID; Megatron-Core 0.9.0's defaults",
        ),
        Recipe(
            name="tensorwise",
            fprop=Product(a=_E4M3, b=_E4M3, fast_accumulate=True),
            dgrad=Product(a=_E5M2, b=_E4M3),
            wgrad=Product(a=_E5M2, b=_E4M3),
            source="torchao tensorwise, Transformer Engine Float8CurrentScaling",
        ),
        Recipe(
            name="rowwise",
            fprop=Product(a=_ROW, b=_ROW, fast_accumulate=True),
            dgrad=Product(a=_ROW, b=_ROW, fast_accumulate=True),
            wgrad=Product(a=_ROW, b=_ROW, fast_accumulate=True),
            source="torchao rowwise",
        ),
        Recipe(
            name="rowwise_gw_hp",
            fprop=Product(a=_ROW, b=_ROW, fast_accumulate=True),
            dgrad=Product(a=_ROW, b=_ROW_WEIGHT, fast_accumulate=True),
            wgrad=Product(a=BF16, b=BF16),
            source="torchao rowwise_with_gw_hp",
        ),
        Recipe(
            name="blockwise",
            fprop=Product(a=_TILE, b=_SQUARE),
            dgrad=Product(a=_TILE, b=_SQUARE),
            wgrad=Product(a=_TILE, b=_TILE),
            promotion=128,
            source="DeepSeek-V3, Transformer Engine Float8BlockScaling",
        ),
        Recipe(
            name="mxfp8",
            fprop=Product(a=_MX, b=_MX),
            dgrad=Product(a=_MX, b=_MX),
            wgrad=Product(a=_MX, b=_MX),
            source="OCP MX 1.0 formats, RCEIL scales: Transformer Engine MXFP8BlockScaling",
        ),
        Recipe(
            name="nvfp4",
            fprop=Product(a=_NV, b=_NV_SQUARE),
            dgrad=Product(a=_NV_GRAD, b=_NV_SQUARE),
            wgrad=Product(
                a=dataclasses.replace(_NV_GRAD, hadamard=16), b=dataclasses.replace(_NV, hadamard=16)
            ),
            source="Transformer Engine NVFP4BlockScaling",
        ),
    )
}
"""Recipe by name."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """A row of the table of what devices compute themselves."""

    device: str
    """Backend name."""

    capability: str
    """From this compute capability on."""

    granularities: tuple[str, ...]
    """What ``Backend.fp8_granularities`` answers then."""

    source: str

    @property
    def recipes(self) -> tuple[str, ...]:
        return native_recipes(self.granularities)


NATIVE: tuple[Native, ...] = (
    Native(device="cuda", capability="8.9", granularities=("tensor",), source="torch._scaled_mm"),
    Native(device="cuda", capability="9.0", granularities=("tensor", "row"), source="torch._scaled_mm"),
    Native(
        device="musa",
        capability="3.1",
        granularities=("tensor", "row"),
        source="torch_musa's torch._scaled_mm: no block scales",
    ),
)
"""What devices have kernels for. What a device has none for is computed on the cpu alone, by the
reference."""


def native_recipes(granularities: tuple[str, ...]) -> tuple[str, ...]:
    """Recipes whose scales a device's kernels know."""
    return tuple(
        name
        for name, recipe in PRESETS.items()
        if all(
            cast.granularity in granularities
            for role in ROLES
            for cast in (recipe.product(role).a, recipe.product(role).b)
            if cast.quantised
        )
    )


def possible_recipes(device: str, granularities: tuple[str, ...]) -> tuple[str, ...]:
    """Recipes that can be trained with on a device: all on the CPU, where the reference computes them; what
    it has kernels for elsewhere."""
    return tuple(PRESETS) if device == "cpu" else native_recipes(granularities)


def require_possible(name: str, device: str, granularities: tuple[str, ...]) -> None:
    """Raises ConfigError for a pair of recipe and device that cannot train, with the possible ones."""
    possible = possible_recipes(device, granularities)
    if name in possible:
        return
    pairs = [f"{', '.join(row.recipes)} on {row.device} from {row.capability}" for row in NATIVE]
    pairs.append(f"{', '.join(PRESETS)} on cpu, emulated")
    raise ConfigError(
        f"fp8_recipe {name} is not possible on this {device} device, whose kernels know FP8 scales per "
        f"{' or '.join(granularities) or 'nothing'}: expected "
        f"{', '.join(possible) or 'no FP8'} here. Possible pairs: {'; '.join(pairs)}. Set --fp8-recipe, or "
        "leave it out; --fp8-backend reference emulates every recipe, slowly."
    )


def recipe_problems(recipe: Recipe) -> list[str]:
    """What hardware refuses about ``recipe``, one line each, on every backend."""
    found = []
    for role in ROLES:
        product = recipe.product(role)
        a, b = product.a, product.b
        where = f"fp8 recipe {recipe.name}, {role}"
        if a.format == b.format == "e5m2":
            found.append(f"{where}: e5m2 x e5m2 has no kernel; expected at least one operand in e4m3.")
        if _is_square(a) and _is_square(b):
            found.append(
                f"{where}: both operands have two-dimensional blocks; expected at least one with blocks of "
                "1 x n."
            )
        if a.quantised != b.quantised:
            found.append(f"{where}: one operand is bf16; expected both or neither.")
        if (a.format == "e2m1") != (b.format == "e2m1"):
            found.append(f"{where}: e2m1 goes with e2m1 alone.")
        if a.hadamard != b.hadamard:
            found.append(f"{where}: one operand alone is rotated; expected the same Hadamard width.")
        if a.quantised and a.granularity == "block" and b.granularity == "block" and a.block[1] != b.block[1]:
            found.append(
                f"{where}: blocks of {a.block[1]} and of {b.block[1]} along the sum; expected equal."
            )
        for cast in (a, b):
            if cast.granularity == "block" and not cast.power_of_2 and cast.block_scale != "e4m3":
                found.append(f"{where}: block scales must be powers of two or e4m3.")
            if cast.stochastic and recipe.scaling == "delayed":
                found.append(f"{where}: stochastic rounding goes with current scaling.")
        if recipe.scaling == "delayed" and (a.granularity != "tensor" or b.granularity != "tensor"):
            found.append(f"{where}: delayed scaling is per tensor.")
    if recipe.scaling == "delayed" and recipe.history < 1:
        found.append(f"fp8 recipe {recipe.name}: history is {recipe.history}; expected at least 1.")
    return found


def _is_square(cast: Cast) -> bool:
    return cast.granularity == "block" and cast.block[0] > 1


def recipe_of(
    name: str,
    *,
    format: str | None = None,
    margin: int | None = None,
    history: int | None = None,
    algorithm: str | None = None,
    amax_group: AmaxGroup | None = None,
    wgrad: bool = True,
) -> Recipe:
    """The preset ``name`` with what a run changes about it.

    ``format``: ``hybrid`` (gradients in e5m2) or ``e4m3`` (everywhere), for recipes with a scale per tensor.
    ``wgrad`` False: weight gradients from bf16. Raises ConfigError for an unknown name and for changes that
    the recipe has no place for.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"fp8_recipe is {name!r}; expected one of {', '.join(PRESETS)}.{hint(name, list(PRESETS))} "
            "Change fp8_recipe."
        )
    recipe = PRESETS[name]
    if format is not None:
        recipe = _with_format(recipe, format)
    delayed = {"margin": margin, "history": history, "algorithm": algorithm, "amax_group": amax_group}
    given: dict[str, Any] = {key: value for key, value in delayed.items() if value is not None}
    if given and recipe.scaling != "delayed":
        names = {
            "margin": "fp8_margin",
            "history": "fp8_amax_history_len",
            "algorithm": "fp8_amax_compute_algo",
            "amax_group": "tp_only_amax_red",
        }
        words = ", ".join(names[key] for key in given)
        raise ConfigError(
            f"{words} with fp8_recipe {name}, which scales by the tensor itself; expected fp8_recipe delayed "
            f"with it. Leave {words} out or set --fp8-recipe delayed."
        )
    if algorithm not in (None, "max", "most_recent"):
        raise ConfigError(
            f"fp8_amax_compute_algo is {algorithm!r}; expected max or most_recent. Set "
            "--fp8-amax-compute-algo."
        )
    recipe = dataclasses.replace(recipe, **given)
    if not wgrad:
        recipe = dataclasses.replace(recipe, wgrad=Product(a=BF16, b=BF16))
    problems = recipe_problems(recipe)
    if problems:
        raise ConfigError(" ".join(problems))
    return recipe


def _with_format(recipe: Recipe, format: str) -> Recipe:
    if format not in ("e4m3", "hybrid"):
        raise ConfigError(f"fp8_format is {format!r}; expected e4m3 or hybrid. Set --fp8-format.")
    wanted: Literal["e4m3", "e5m2"] = "e5m2" if format == "hybrid" else "e4m3"
    changed: dict[str, Any] = {}
    roles: tuple[Role, ...] = ("dgrad", "wgrad")
    for role in roles:
        product = recipe.product(role)
        if product.a.format == wanted or not product.quantised:
            continue
        if product.a.granularity != "tensor":
            raise ConfigError(
                f"fp8_format {format} with fp8_recipe {recipe.name}, whose gradients are {product.a.text}; "
                "expected a recipe with a scale per tensor (delayed, tensorwise). Leave --fp8-format out."
            )
        changed[role] = dataclasses.replace(product, a=_tensor(wanted))
    return dataclasses.replace(recipe, **changed)

"""What the casts lose, measured in some steps: underflow, saturation, SNR, by linear and operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mt_megatron.fp8.quantise import Quantised, rotated

if TYPE_CHECKING:
    from mt_megatron.fp8.recipe import Kind, Role
    from mt_megatron.fp8.state import Fp8State

BLOCK = 128
"""Elements whose signal-to-noise ratio is one sample of the median."""

SAMPLED = 1 << 15
"""Elements of a tensor that are looked at: whole blocks, evenly spread."""

FIELDS = ("underflow", "saturation", "not_finite", "snr", "scale")
"""``underflow``: share of elements that are not zero and become zero. ``saturation``: share beyond the
format's range. ``not_finite``: share that is NaN or infinite, before the cast. ``snr``: median over blocks
of signal to noise, dB. ``scale``: log2 of the median scale."""

_WORST = {"underflow": 1.0, "saturation": 1.0, "not_finite": 1.0, "snr": -1.0, "scale": 1.0}
"""The sign under which a larger value is worse, so that one reduction by the largest keeps the worst."""


class Telemetry:
    """Measures of one sampled step; the first cast of each operand counts."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str, str], Tensor] = {}
        self._scales: dict[tuple[str, str, str], float] = {}
        self.write: Callable[[dict[str, Any]], None] | None = None

    def measure(self, name: str, kind: Kind, role: Role, x: Tensor, quantised: Quantised) -> None:
        key = (name, kind, role)
        # An expert without tokens says nothing.
        if key not in self._measured and x.numel():
            self._measured[key] = measures(x, quantised)

    def complete(self, state: Fp8State) -> None:
        """Reduce to the worst rank's values, write records, and demote what passes the thresholds."""
        keys = sorted(self._all_keys(state))
        absent = torch.full((len(FIELDS),), -math.inf, dtype=torch.float64)
        signs = torch.tensor([_WORST[field] for field in FIELDS], dtype=torch.float64)
        values = torch.stack(
            [self._measured[key] * signs if key in self._measured else absent for key in keys]
        )
        values = values.to(state._device(), torch.float32)
        state.reduce_max(values)
        table = (values.cpu().double() * signs).tolist()
        for (name, kind, role), row in zip(keys, table, strict=True):
            if not math.isfinite(row[0]):
                continue
            found = dict(zip(FIELDS, row, strict=True))
            before = self._scales.get((name, kind, role))
            self._scales[name, kind, role] = found["scale"]
            record = {
                "event": "fp8",
                "iteration": state.step,
                "step": state.step,
                "recipe": state.recipe.name,
                "linear": name,
                "operand": kind,
                "role": role,
                **found,
                "scale_change": 0.0 if before is None else found["scale"] - before,
            }
            why = _reason(found, state)
            reason = None if why is None else f"{kind} of {role} {why}"
            if reason is not None and not state.is_demoted(name):
                state.demote(name)
                record["demoted"] = reason
                state.announce(f"fp8: {name} falls back to bf16 after step {state.step}: {reason}")
            if self.write is not None:
                self.write(record)
        self._measured.clear()

    def _all_keys(self, state: Fp8State) -> set[tuple[str, str, str]]:
        # The same on every rank of the reduction, whichever experts it has rows for.
        from mt_megatron.fp8.recipe import OPERANDS, ROLES

        return {
            (name, kind, role)
            for name in state.linears
            for role in ROLES
            if state.recipe.product(role).quantised
            for kind in OPERANDS[role]
        }


def _reason(found: dict[str, float], state: Fp8State) -> str | None:
    options = state.options
    for field, limit in (("underflow", options.demote_underflow), ("saturation", options.demote_saturation)):
        if limit is not None and found[field] > limit:
            return f"has {100 * found[field]:.2f} % {field}, above {100 * limit:.2f} % (fp8_demote_{field})"
    if options.demote_snr is not None and found["snr"] < options.demote_snr:
        return (
            f"has a median SNR of {found['snr']:.2f} dB, below {options.demote_snr:.2f} dB (fp8_demote_snr)"
        )
    return None


def measures(x: Tensor, quantised: Quantised) -> Tensor:
    """``FIELDS`` of one cast, fp64 on the host."""
    if quantised.cast.hadamard:
        x = rotated(x, quantised.along, quantised.cast.hadamard)
    rows, columns = x.shape
    if x.numel() == 0:
        return torch.zeros(len(FIELDS), dtype=torch.float64)
    # Whole rows: a block of a row shares at most a few scales.
    wanted = max(1, SAMPLED // max(1, columns))
    step = max(1, rows // wanted)
    picked = x[::step].float()
    decoded = _rows(quantised, step, rows)
    finite = torch.isfinite(picked)
    clean = torch.where(finite, picked, 0.0)
    error = torch.nan_to_num(decoded, nan=0.0) - clean
    nonzero = clean != 0
    count = nonzero.sum().clamp_min(1)
    underflow = ((decoded == 0) & nonzero).sum() / count
    top = quantised.format.maximum * _inverse_rows(quantised, step, rows)
    # Half a unit above the largest value still rounds to it.
    saturation = (clean.abs() > top * (1 + quantised.format.relative_error / 2)).sum() / count
    width = min(BLOCK, columns)
    usable = columns // width * width
    signal = clean[:, :usable].square().reshape(-1, width).sum(1)
    noise = error[:, :usable].square().reshape(-1, width).sum(1)
    with_signal = signal > 0
    if bool(with_signal.any()):
        ratios = 10 * torch.log10(signal[with_signal] / noise[with_signal].clamp_min(1e-38))
        snr = ratios.clamp(-100, 100).median()
    else:
        snr = torch.tensor(100.0)
    scale = quantised.inverse.float().flatten()
    positive = scale[scale > 0]
    middle = torch.log2(positive.median()) if positive.numel() else torch.tensor(0.0)
    found = [underflow, saturation, 1 - finite.float().mean(), snr, -middle]
    return torch.stack([each.cpu().double() for each in found])


def _rows(quantised: Quantised, step: int, rows: int) -> Tensor:
    values = quantised.values(torch.bfloat16)[:rows:step].float()
    outer = quantised.outer
    if outer is None:
        return values
    return values * (outer[:rows:step] if outer.dim() and outer.shape[0] == rows else outer)


def _inverse_rows(quantised: Quantised, step: int, rows: int) -> Tensor:
    """What a decoded code of one is multiplied by, for the picked rows."""
    from mt_megatron.fp8.quantise import _by_blocks

    if quantised.cast.granularity != "block":
        inverse = quantised.inverse
        return inverse[:rows:step] if inverse.dim() and inverse.shape[0] == rows else inverse
    ones = torch.ones(quantised.codes.shape, device=quantised.codes.device)
    spread = _by_blocks(ones, quantised.inverse, quantised.cast, quantised.along)[:rows:step]
    return spread if quantised.second is None else spread * quantised.second

"""What the casts lose, measured in some steps: underflow, saturation, SNR, by linear and operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mt_megatron.fp8.formats import decode
from mt_megatron.fp8.quantise import Quantised, _sizes, rotated
from mt_megatron.fp8.state import is_first_of_stage

if TYPE_CHECKING:
    from mt_megatron.fp8.recipe import Kind, Role
    from mt_megatron.fp8.state import Fp8State

BLOCK = 128
"""Elements whose signal-to-noise ratio is one sample of the median."""

SAMPLED = 1 << 15
"""Elements of a tensor that are looked at: whole rows, evenly spread."""

SCALES = 1 << 12
"""Scales of a tensor that are looked at, evenly spread."""

BEST = 100.0
"""SNR in dB of a cast that loses nothing."""

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

    def forget(self) -> None:
        """Drop what was measured since the last ``complete``."""
        self._measured.clear()

    def complete(self, state: Fp8State) -> None:
        """Reduce to the worst rank's values, write records, and demote what passes the thresholds."""
        keys = sorted(self._all_keys(state))
        device = state._device()
        absent = torch.full((len(FIELDS),), -math.inf, device=device)
        signs = torch.tensor([_WORST[field] for field in FIELDS], device=device)
        values = torch.stack(
            [self._measured[key] * signs if key in self._measured else absent for key in keys]
        )
        state.reduce_max(values)
        # The only wait for the device.
        table = (values * signs).tolist()
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
                if is_first_of_stage():
                    state.announce(f"fp8: {name} falls back to bf16 after step {state.step}: {reason}")
            if self.write is not None:
                self.write(record)
        self.forget()

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
    if found["not_finite"] > 0:
        # Measures of a whole tensor are spoilt by one infinity, which is no fault of the format.
        return None
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
    """``FIELDS`` of one cast of ``x`` [rows, columns]: fp32, on its device, which nobody waits for."""
    if x.numel() == 0:
        return torch.zeros(len(FIELDS), device=x.device)
    cast, fmt = quantised.cast, quantised.format
    # Rows that are rotated together are looked at together.
    unit = cast.hadamard if cast.hadamard and quantised.along == 0 else 1
    rows, columns = quantised.codes.shape
    units = -(-rows // unit)
    step = max(1, units // max(1, SAMPLED // (columns * unit)))

    def picked(values: Tensor) -> Tensor:
        if unit == 1:
            return values[::step]
        missing = units * unit - values.shape[0]
        if missing:
            values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        return values.view(units, unit, -1)[::step].reshape(-1, values.shape[1])

    source = picked(x).float()
    if cast.hadamard:
        source = rotated(source, quantised.along, cast.hadamard)
    inverse = quantised.inverse
    if cast.granularity == "block":
        across, along = _sizes(cast, quantised.along)
        row = picked(torch.arange(rows, device=x.device)[:, None])[:, 0]
        inverse = inverse[row // across].repeat_interleave(along, 1)[:, :columns]
        if quantised.second is not None:
            inverse = inverse * quantised.second
    elif inverse.dim() and inverse.shape[0] == rows:
        inverse = picked(inverse)
    # The stored codes: what became of the source, whatever read it.
    decoded = decode(picked(quantised.codes.view(torch.uint8)).view(quantised.codes.dtype), fmt).float()
    decoded = decoded * inverse
    finite = torch.isfinite(source)
    clean = torch.where(finite, source, 0.0)
    nonzero = clean != 0
    count = nonzero.sum().clamp_min(1)
    underflow = ((decoded == 0) & nonzero).sum() / count
    # Half a unit above the largest value still rounds to it.
    top = fmt.maximum * (1 + fmt.relative_error / 2) * inverse
    saturation = (clean.abs() > top).sum() / count
    width = min(BLOCK, columns)
    usable = columns // width * width
    error = torch.nan_to_num(decoded, nan=0.0) - clean
    signal = clean[:, :usable].square().reshape(-1, width).sum(1)
    noise = error[:, :usable].square().reshape(-1, width).sum(1)
    # Squares that overflow say nothing good of the cast.
    ratios = torch.nan_to_num(10 * torch.log10(signal / noise.clamp_min(1e-38)), nan=-BEST)
    snr = _median(ratios, signal > 0, otherwise=BEST).clamp(-BEST, BEST)
    scales = quantised.inverse.flatten()
    step = max(1, scales.numel() // SCALES)
    # Else the same columns of each row, the first features alone, would be looked at.
    while math.gcd(step, quantised.inverse.shape[-1] if quantised.inverse.dim() else 1) > 1:
        step += 1
    scales = scales[::step]
    scale = -torch.log2(_median(scales, scales > 0, otherwise=1.0))
    found = [underflow, saturation, 1 - finite.float().mean(), snr, scale]
    return torch.stack([each.float() for each in found])


def _median(values: Tensor, valid: Tensor, *, otherwise: float) -> Tensor:
    """Lower median of the ``valid`` elements of ``values`` [n], a scalar; ``otherwise`` where there is none.
    A selection by mask, and ``torch.nanmedian``, would wait for the device."""
    ordered = torch.where(valid, values, torch.inf).sort().values
    count = valid.sum()
    middle = ordered.index_select(0, ((count - 1) // 2).clamp_min(0).view(1))[0]
    return torch.where(count > 0, middle, otherwise)

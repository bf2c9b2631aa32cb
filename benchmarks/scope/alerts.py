"""Measurement of the recording's alerts: false ones in quiet runs, planted faults that are found.

``python benchmarks/scope/alerts.py tune``   series of a generator, on which the model's constants were chosen
``python benchmarks/scope/alerts.py judge``  trainings of a small transformer, which it had not seen
``python benchmarks/scope/alerts.py factors [--seed SEED --quiet TRAININGS] [--run RUN ...]``  gradient norms
and losses of each step: alerts of the series as they are, and the share of steps at which a value ``FACTORS``
times as high is an alert

``judge --write`` writes ``results/scope-alerts-DATE``. A fault is found where an alert comes within
``WITHIN`` samples of it.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mt_megatron.scope.recording.data import Value
from mt_megatron.scope.sidecar.alerts import FEWEST, AlertModel, Band

Floats = NDArray[np.float64]

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"

WITHIN = 10
"""Samples after a fault in which an alert counts as having found it."""

SERIES = 60
"""Of each kind of the tuning generator."""

SAMPLES = 500
"""Of each series."""


# The generator on which the constants were chosen.


def noises(count: int, draw: np.random.Generator) -> dict[str, Floats]:
    """Noise of the logarithm, by kind."""
    size = math.exp(draw.uniform(math.log(0.002), math.log(0.25)))
    white = draw.standard_normal(count)
    slow = np.empty(count)
    slow[0] = 0.0
    for index in range(1, count):
        slow[index] = 0.8 * slow[index - 1] + 0.6 * white[index]
    return {
        "normal": size * white,
        "autocorrelated": size * slow,
        "heavy tails": size * draw.standard_t(4, count),
        "skewed": size * (draw.gamma(2.0, 1.0, count) - 2.0),
    }


def trends(count: int, draw: np.random.Generator) -> dict[str, Floats]:
    """Logarithm without noise, by kind."""
    at = np.arange(count)
    warm = int(draw.integers(20, 120))
    return {
        "level": np.zeros(count),
        "decay": draw.uniform(0.5, 2.0) * np.exp(-at / draw.uniform(30, 200)),
        "growth": draw.uniform(0.2, 1.5) * np.log1p(at / draw.uniform(5, 50)),
        "warm-up and cosine": np.log(
            np.where(
                at < warm,
                (at + 1) / warm,
                0.55 + 0.45 * np.cos(np.pi * np.clip((at - warm) / max(1, count - warm), 0, 1)),
            )
        ),
    }


def faults(at: int, count: int, draw: np.random.Generator) -> dict[str, Floats]:
    """What a fault from sample ``at`` on adds to the logarithm, by kind."""
    after = np.arange(count) >= at
    since = np.maximum(np.arange(count) - at, 0)
    return {
        "spike x3": np.where(np.arange(count) == at, math.log(3), 0.0),
        "spike x10": np.where(np.arange(count) == at, math.log(10), 0.0),
        "level x2": np.where(after, math.log(2), 0.0),
        "level x5": np.where(after, math.log(5), 0.0),
        "fall to a tenth": np.where(after, -math.log(10), 0.0),
        "growth 20 % a sample": np.where(after, np.minimum(0.18 * since, 4.0), 0.0),
    }


def alerts_of(series: Floats) -> list[int]:
    band = Band()
    return [index for index, value in enumerate(series) if band.take(float(value)) is not None]


def tune(seed: int) -> None:
    draw = np.random.default_rng(seed)
    print("alerts of quiet series, per 100,000 samples:")
    for trend in trends(SAMPLES, draw):
        row = []
        for noise in noises(SAMPLES, draw):
            found = 0
            for _ in range(SERIES):
                series = np.exp(trends(SAMPLES, draw)[trend] + noises(SAMPLES, draw)[noise])
                found += len(alerts_of(series))
            row.append(f"{noise} {1e5 * found / (SERIES * SAMPLES):.1f}")
        print(f"  {trend}: {', '.join(row)}")
    print("faults found (noise up to 10 % a sample):")
    for fault in faults(0, SAMPLES, draw):
        found = tried = 0
        for _ in range(SERIES):
            at = int(draw.integers(100, 400))
            name = str(draw.choice(list(noises(2, draw))))
            noise = noises(SAMPLES, draw)[name]
            noise *= 0.1 * draw.random() / max(0.1, float(noise.std()))
            base = trends(SAMPLES, draw)[str(draw.choice(list(trends(50, draw))))]
            series = np.exp(base + noise + faults(at, SAMPLES, draw)[fault])
            tried += 1
            found += any(at <= index < at + WITHIN for index in alerts_of(series))
        print(f"  {fault}: {found} of {tried}")


# Trainings on which it was judged.


def words(length: int) -> NDArray[np.uint8]:
    """Real text: sources of the standard library."""
    import os

    folder = Path(os.__file__).parent
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) > length:
            break
    return np.frombuffer(text[:length], np.uint8)


FAULTS = (
    "noise instead of data",
    "learning rate x 30",
    "weights of a layer x 3",
    "one loss x 100",
    "noise in a layer",
    "NaN in a layer",
    "a layer's gradients are lost",
)


def training(
    seed: int, steps: int, interval: int, text: NDArray[np.uint8], fault: tuple[str, int, int] | None
) -> Iterator[tuple[int, float, float, list[Value]]]:
    """Step, loss, gradient norm and statistics (every ``interval`` steps) of a small transformer. ``fault``:
    its name, step, layer."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    hidden, depth, heads, length, batch = 48, 4, 4, 48, 6
    moe = bool(draw.random() < 0.5)
    rate = 10 ** draw.uniform(-3.3, -2.3)
    warm = int(draw.integers(10, 80))
    norm = nn.LayerNorm if draw.random() < 0.5 else nn.RMSNorm

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = norm(hidden), norm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
            self.router = nn.Linear(hidden, 4)
            self.seen: dict[str, float] = {}

        def forward(self, x: Any, watch: bool, spoil: float) -> Any:
            before = x
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            logits = q @ k.transpose(-1, -2) / math.sqrt(hidden // heads)
            logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            rows = logits.softmax(-1)
            x = x + self.out((rows @ v).transpose(1, 2).reshape(batch, length, hidden))
            inner = self.norm2(x)
            if moe:
                scores = self.router(inner).softmax(-1)
                gate = scores.max(-1, keepdim=True).values
                x = x + gate * self.down(torch.relu(self.up(inner)))
            else:
                x = x + self.down(torch.relu(self.up(inner)))
            if spoil:
                x = x + spoil * torch.randn_like(x)
            if watch:
                with torch.no_grad():
                    entropy = -(rows * rows.clamp_min(1e-30).log()).sum(-1).mean()
                    self.seen = {
                        "activation_rms": float(x.pow(2).mean().sqrt()),
                        "activation_max": float(x.abs().max()),
                        "residual_growth": float(x.norm() / before.norm()),
                        "attention_logit_max": float(logits.nan_to_num(neginf=-1e9).max()),
                        "attention_entropy": float(entropy),
                        "outlier_channels": float(x.abs().amax((0, 1)).max() / x.pow(2).mean().sqrt()),
                        "not_finite": float((~torch.isfinite(x)).sum()),
                    }
            return x

    embed, place = nn.Embedding(256, hidden), nn.Embedding(length, hidden)
    blocks = nn.ModuleList(Block() for _ in range(depth))
    head = nn.Linear(hidden, 256)
    modules = nn.ModuleList([embed, place, blocks, head])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=rate, weight_decay=0.1)
    for step in range(1, steps + 1):
        now = fault[0] if fault is not None and step >= fault[1] else ""
        once = fault[0] if fault is not None and step == fault[1] else ""
        starts = draw.integers(0, len(text) - length - 1, batch)
        ids = torch.from_numpy(np.stack([text[at : at + length + 1] for at in starts]).astype(np.int64))
        if now == "noise instead of data":
            ids = torch.from_numpy(draw.integers(0, 256, (batch, length + 1)))
        scheduled = min(1.0, step / warm) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate * scheduled * (30 if now == "learning rate x 30" else 1)
        if once == "weights of a layer x 3":
            with torch.no_grad():
                blocks[fault[2]].qkv.weight *= 3  # type: ignore[index, union-attr]
        watch = step % interval == 0
        x = embed(ids[:, :-1]) + place.weight
        for index, block in enumerate(blocks):
            here = fault is not None and index == fault[2]
            spoil = 2.0 * float(x.detach().std()) if here and now == "noise in a layer" else 0.0
            x = block(x, watch, math.nan if here and now == "NaN in a layer" else spoil)
        loss = nn.functional.cross_entropy(head(x).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        (loss * (100 if once == "one loss x 100" else 1)).backward()
        if now == "a layer's gradients are lost":
            for parameter in blocks[fault[2]].parameters():  # type: ignore[index]
                if parameter.grad is not None:
                    parameter.grad.zero_()
        norm_of = float(nn.utils.clip_grad_norm_(modules.parameters(), 1.0))
        before = [[p.detach().clone() for p in block.parameters()] for block in blocks] if watch else []
        gradients = [
            math.sqrt(sum(float(p.grad.pow(2).sum()) for p in block.parameters() if p.grad is not None))
            for block in blocks
        ]
        optimizer.step()
        values = []
        if watch:
            for index, block in enumerate(blocks):
                weight = math.sqrt(sum(float(p.detach().pow(2).sum()) for p in block.parameters()))
                moved = math.sqrt(
                    sum(
                        float((p.detach() - old).pow(2).sum())
                        for p, old in zip(block.parameters(), before[index], strict=True)
                    )
                )
                # Before clipping, as the scope's.
                gradient = gradients[index] * max(1.0, norm_of) if math.isfinite(norm_of) else math.nan
                own = block.seen | {
                    "gradient_norm": gradient,
                    "weight_norm": weight,
                    "update_ratio": moved / weight if weight else math.nan,
                }
                for name, value in own.items():
                    path = f"decoder.layers.{index}"
                    values.append(Value(path=path, statistic=name, value=value, parts=1, of=1, partial=False))
        yield step, float(loss), norm_of, values


def judged(
    seed: int, steps: int, interval: int, text: NDArray[np.uint8], fault: tuple[str, int, int] | None
) -> tuple[list[tuple[int, str, str]], int]:
    """Alerts (step, statistic, text) and judged values of one training."""
    model = AlertModel()
    model.modules(f"decoder.layers.{index}" for index in range(4))
    found = []
    count = 0
    for step, loss, norm, values in training(seed, steps, interval, text, fault):
        alerts = model.step(step, loss=loss, grad_norm=norm, skipped=False, known=True)
        alerts += model.statistics(step, values)
        count += 2 + len(values)
        found += [(step, each.statistic, each.text) for each in alerts]
    return found, count


def judge(quiet: int, each: int, steps: int, interval: int, write: bool) -> None:
    import torch
    from recording import machine, record, table

    torch.set_num_threads(1)
    text = words(2_000_000)
    false: list[int] = []
    judged_values = 0
    told: list[str] = []
    for seed in range(quiet):
        found, count = judged(1000 + seed, steps, interval, text, None)
        false.append(len(found))
        judged_values += count
        told += [f"seed {1000 + seed}, step {step}: {line}" for step, _, line in found]
        print(f"quiet run {seed}: {len(found)} alerts", flush=True)
    rows = []
    for kind in FAULTS:
        hits, delays, named = 0, [], 0
        for index in range(each):
            seed = 2000 + 100 * FAULTS.index(kind) + index
            draw = np.random.default_rng(seed)
            at, layer = (
                int(draw.integers(steps // 3, steps - WITHIN * interval - 1)),
                int(draw.integers(0, 4)),
            )
            found, _ = judged(seed, steps, interval, text, (kind, at, layer))
            after = [alert for alert in found if at <= alert[0] <= at + WITHIN * interval]
            hits += bool(after)
            delays += [after[0][0] - at] if after else []
            named += any(f"decoder.layers.{layer}" in line for _, _, line in after)
        rows.append(
            {
                "fault": kind,
                "runs": each,
                "found": hits,
                "layer named": named,
                "median delay in steps": float(np.median(delays)) if delays else None,
            }
        )
        print(rows[-1], flush=True)
    figures = {
        "machine": machine(),
        "steps": steps,
        "interval": interval,
        "quiet runs": quiet,
        "alerts of quiet runs": false,
        "values judged in quiet runs": judged_values,
        "alerts per 100,000 values": 1e5 * sum(false) / max(1, judged_values),
        "texts": told,
        "faults": rows,
    }
    print(f"{sum(false)} alerts in {quiet} quiet runs, {judged_values} values judged")
    if write:
        header = ("fault", "runs", "found", "layer named", "median delay (steps)")
        lines = [
            [
                str(row["fault"]),
                str(row["runs"]),
                str(row["found"]),
                str(row["layer named"]),
                "-" if row["median delay in steps"] is None else f"{row['median delay in steps']:.0f}",
            ]
            for row in rows
        ]
        title = "Alerts of the recording: quiet trainings and planted faults"
        about = (
            f"{sum(false)} alerts in {quiet} quiet runs of {steps} steps ({judged_values:,} values judged, "
            f"{figures['alerts per 100,000 values']:.2f} per 100,000); {sum(map(bool, false))} runs with one."
        )
        record(RESULTS, "scope-alerts", title, figures, f"{about}\n\n{table(header, lines)}")


# Series with a value for each step.


FACTORS = (2, 3, 6, 10)

EARLY = 80
"""Steps of a run that are counted apart: its warm-up."""


def drawn(count: int, draw: np.random.Generator, each: int = 40) -> dict[str, list[Floats]]:
    """Gradient norms of mechanisms that the tuning generator does not have, by kind."""
    at = np.arange(count)

    def following(noise: Floats, share: float) -> Floats:
        found = noise.copy()
        for index in range(1, count):
            found[index] = share * found[index - 1] + math.sqrt(1 - share**2) * noise[index]
        return found

    def normal() -> Floats:
        return draw.standard_normal(count)

    # Order of the draws: documented figures are of it.
    kinds = {
        "t3, AR(0.6), fall by e^3": lambda: (
            3 * np.exp(-at / 30) + 0.1 * following(draw.standard_t(3, count), 0.6)
        ),
        "normal, AR(0.95)": lambda: 0.3 * following(normal(), 0.95),
        "changing volatility": lambda: 0.08 * np.exp(0.5 * following(normal(), 0.95)) * normal(),
        "Laplace, growing": lambda: (0.05 + 0.2 * at / count) * draw.laplace(size=count) / math.sqrt(2),
        "steep warm-up": lambda: np.log(50 * np.exp(-at / 8) + np.exp(0.1 * normal())),
    }
    return {name: [np.exp(kind()) for _ in range(each)] for name, kind in kinds.items()}


def factors(runs: list[Path], first_seed: int, trainings: int) -> None:
    """Print a line for each part of each lot: recordings of ``runs``, trainings, drawn series."""
    from mt_megatron.scope.recording.files import ScopeFiles
    from mt_megatron.scope.recording.reader import Recording

    count = 400
    lots: dict[str, list[Floats]] = {}
    for run in runs:
        recording = Recording(ScopeFiles(run / "scope"))
        for session in recording.sessions():
            steps = recording.steps(first=0, session=session.number)
            lots.setdefault("runs, gradient norm", []).append(steps.grad_norm)
            lots.setdefault("runs, loss", []).append(steps.loss)
    text = words(2_000_000) if trainings else np.empty(0, np.uint8)
    for seed in range(first_seed, first_seed + trainings):
        rows = np.array([row[1:3] for row in training(seed, count, count + 1, text, None)])
        lots.setdefault("trainings, gradient norm", []).append(rows[:, 1])
        lots.setdefault("trainings, loss", []).append(rows[:, 0])
    for name, series in (lots | drawn(count, np.random.default_rng(20261129))).items():
        for first, last in ((FEWEST, EARLY), (EARLY, sys.maxsize)):
            steps_judged = alerts = 0
            found = np.zeros(len(FACTORS))
            for values in series:
                band = Band()
                for step, value in enumerate(map(float, values)):
                    if first <= step < last:
                        steps_judged += 1
                        found += [copy.deepcopy(band).take(each * value) is not None for each in FACTORS]
                        alerts += copy.deepcopy(band).take(value) is not None
                    band.take(value)
            shares = ", ".join(
                f"x{each} {100 * share / max(1, steps_judged):.0f} %"
                for each, share in zip(FACTORS, found, strict=True)
            )
            part = f"steps {first + 1} to {EARLY}" if first == FEWEST else f"from step {EARLY + 1} on"
            print(f"{name}, {part}: {alerts} alerts in {steps_judged} steps; {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tune", "judge", "factors"))
    parser.add_argument(
        "--run", nargs="*", default=[], type=Path, help="folders of runs with a recording (factors)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet", type=int, default=20)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.what == "tune":
        tune(given.seed)
    elif given.what == "factors":
        factors(given.run, given.seed, given.quiet)
    else:
        judge(given.quiet, given.each, given.steps, given.interval, given.write)


if __name__ == "__main__":
    main()

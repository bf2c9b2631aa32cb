"""Synthetic runs for tests and for looking at pages: what ranks would send, as frames, and what it means.

``write_run(folder)`` writes a recording of a small Llama or mixture of experts through frames, as
sidecars do, and returns what the frames say in plain arrays. Everything follows from the seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_megatron.scope.format.frames import VERSION, decode, encode
from mt_megatron.scope.recording.files import add_bookmark, scope_files, write_requests
from mt_megatron.scope.recording.writer import Alert, Writer

Frame = dict[str, Any]
Floats = NDArray[np.float64]

START_NS = 1_790_000_000_000_000_000


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """Which run: layout, model, what is recorded."""

    steps: int = 200
    first_step: int = 1
    interval: int = 10
    """Steps between two with statistics."""

    tp: int = 2
    pp: int = 2
    dp: int = 1
    nodes: int = 1
    layers: int = 4
    heads: int = 8
    hidden: int = 64
    experts: int = 0
    """0: dense."""

    tensor_every: int = 50
    """Steps between two with tensors; 0: none."""

    validation_every: int = 0
    """Steps between two evaluations; 0: none."""

    token_every: int = 50
    tokens: int = 256
    """Of a sequence."""

    best: int = 8
    """Candidates of each token."""

    attention_tokens: int = 0
    """Of attention maps [tokens, tokens], one for each of ``attention_heads``; 0: none."""

    attention_heads: int = 2
    attention_layers: int = 1
    """First layers that have maps."""

    session: str = "first"
    seed: int = 1
    perturbed: tuple[int, int] | None = None
    """First and last step under a perturbation."""

    nan_at: int | None = None
    """Step from which on a layer's output has NaN, and all after it."""

    dead_expert_from: int | None = None
    scale: float = 1.0
    """Factor on all activations: another run."""

    differs_from: int | None = None
    """Step from which on ``differs_at`` and what follows it is 1 % larger."""

    differs_at: str = "decoder.layers.2.mlp"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(kw_only=True)
class Truth:
    """What was recorded, by straightforward arithmetic."""

    shape: RunShape
    values: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    vectors: dict[tuple[str, str], dict[int, Floats]] = field(default_factory=dict)
    loss: dict[int, float] = field(default_factory=dict)
    tensors: dict[tuple[int, str, str, str], NDArray[Any]] = field(default_factory=dict)
    """By step, path, what and JSON of the index."""

    tokens: dict[tuple[int, int], dict[str, NDArray[Any]]] = field(default_factory=dict)
    """By step and sample."""


def coordinates(shape: RunShape, rank: int) -> dict[str, int]:
    """Ranks in the order tp, dp, pp, as Megatron-Core places them."""
    tp, rest = rank % shape.tp, rank // shape.tp
    return {"tp": tp, "dp": rest % shape.dp, "pp": rest // shape.dp, "cp": 0, "ep": 0}


def layers_of(shape: RunShape, stage: int) -> range:
    each = shape.layers // shape.pp
    return range(stage * each, (stage + 1) * each)


def modules_of(shape: RunShape, stage: int) -> list[list[Any]]:
    """As ``named_modules`` gives them: parents before children, in the order in which they are built."""
    hidden = shape.hidden
    found: list[list[Any]] = [["", "GPTModel", 0]]
    if stage == 0:
        found += [["embedding", "LanguageModelEmbedding", 512 * hidden]]
        found += [["embedding.word_embeddings", "VocabParallelEmbedding", 512 * hidden]]
    found += [["decoder", "TransformerBlock", 0], ["decoder.layers", "ModuleList", 0]]
    for layer in layers_of(shape, stage):
        at = f"decoder.layers.{layer}"
        found += [
            [at, "TransformerLayer", 0],
            [f"{at}.input_layernorm", "RMSNorm", hidden],
            [f"{at}.self_attention", "SelfAttention", 4 * hidden * hidden],
            [f"{at}.self_attention.core_attention", "DotProductAttention", 0],
            [f"{at}.self_attention.linear_proj", "RowParallelLinear", hidden * hidden],
            [f"{at}.self_attention.linear_qkv", "ColumnParallelLinear", 3 * hidden * hidden],
            [f"{at}.pre_mlp_layernorm", "RMSNorm", hidden],
        ]
        if shape.experts:
            found += [
                [f"{at}.mlp", "MoELayer", 0],
                [f"{at}.mlp.router", "TopKRouter", shape.experts * hidden],
            ]
            found += [[f"{at}.mlp.experts", "SequentialMLP", 8 * hidden * hidden]]
        else:
            found += [[f"{at}.mlp", "MLP", 8 * hidden * hidden]]
            found += [[f"{at}.mlp.linear_fc1", "ColumnParallelLinear", 4 * hidden * hidden]]
            found += [[f"{at}.mlp.linear_fc2", "RowParallelLinear", 4 * hidden * hidden]]
    if stage == shape.pp - 1:
        found += [["decoder.final_layernorm", "RMSNorm", hidden]]
        found += [["output_layer", "ColumnParallelLinear", 512 * hidden]]
    return found


def entries_of(shape: RunShape, stage: int) -> list[list[Any]]:
    """Path, statistic, length of what a rank of ``stage`` sends."""
    found: list[list[Any]] = []
    if stage == 0:
        found += [["embedding", "embedding_norm", 2], ["embedding", "gradient_norm", 1]]
    for layer in layers_of(shape, stage):
        at = f"decoder.layers.{layer}"
        found += [[at, "activation_rms", 2], [at, "activation_max", 1], [at, "not_finite", 2]]
        found += [[at, "residual_growth", 2], [at, "outlier_channels", 34]]
        found += [[at, "gradient_norm", 1], [at, "weight_norm", 1], [at, "update_ratio", 2]]
        for name in ("self_attention", "mlp"):
            found += [[f"{at}.{name}", "activation_rms", 2]]
        found += [[f"{at}.self_attention", "attention_logit_max", 1]]
        found += [[f"{at}.self_attention", "attention_entropy", 2]]
        if shape.experts:
            found += [[f"{at}.mlp.router", "router_entropy", 2]]
            found += [[f"{at}.mlp.router", "expert_load", shape.experts]]
    if stage == shape.pp - 1:
        found += [["output_layer", "loss_per_position", 128]]
        found += [["output_layer", "activation_rms", 2], ["output_layer", "gradient_norm", 1]]
    return found


def hello(shape: RunShape, rank: int) -> Frame:
    at = coordinates(shape, rank)
    return {
        "k": "hello",
        "v": VERSION,
        "rank": rank,
        "world_size": shape.world_size,
        "at": at,
        "layout": {"tp": shape.tp, "pp": shape.pp, "dp": shape.dp, "cp": 1, "ep": 1},
        "host": f"node{node_of(shape, rank)}",
        "pid": 1000 + rank,
        "session": shape.session,
        "model": {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "num_experts": shape.experts or None,
        },
        "modules": modules_of(shape, at["pp"]),
    }


def node_of(shape: RunShape, rank: int) -> int:
    return rank * shape.nodes // shape.world_size


def schema(shape: RunShape, rank: int) -> Frame:
    return {"k": "schema", "id": 1, "entries": entries_of(shape, coordinates(shape, rank)["pp"])}


def _noise(*key: object) -> np.random.Generator:
    """A generator of its own for each key: what one rank draws depends on no other."""
    words = [int.from_bytes(str(each).encode()[-8:], "little") for each in key]
    return np.random.default_rng([word % 2**32 for word in words] + [len(words)])


def part_of(shape: RunShape, rank: int, step: int, path: str, statistic: str, length: int) -> Floats:
    """One rank's part: of trends that training shows, with noise that the seed decides."""
    draw = _noise(shape.seed, rank, step, path, statistic)
    layer = int(path.split(".")[2]) if path.startswith("decoder.layers.") else 0
    size = shape.scale * (1 + 0.1 * layer) * (1 + 0.002 * step) * math.exp(0.02 * draw.standard_normal())
    if shape.differs_from is not None and step >= shape.differs_from and _after(path, shape.differs_at):
        size *= 1.01
    broken = shape.nan_at is not None and step >= shape.nan_at and (layer > 1 or path == "output_layer")
    if statistic == "activation_max":
        return np.array([np.nan if broken else 6 * size])
    if statistic == "attention_logit_max":
        return np.array([8 * size])
    if statistic == "not_finite":
        return np.array([37.0 if broken else 0.0, 0.0])
    if statistic == "expert_load":
        weights = 1 + 0.3 * np.sin(np.arange(length) + layer)
        if shape.dead_expert_from is not None and step >= shape.dead_expert_from and layer == 1:
            weights[3 % length] = 0.0
        return np.floor(4096 * weights / weights.sum() * (1 + 0.05 * draw.random(length)))
    if statistic == "loss_per_position":
        counts = np.full(64, 128.0)
        return np.concatenate([counts * (loss_of(shape, step) + np.linspace(0.5, -0.2, 64)), counts])
    if statistic == "outlier_channels":
        channels = draw.permutation(shape.hidden)[:16]
        largest = np.sort(4 + 4 * draw.random(16))[::-1] * size
        pairs = np.stack([channels, largest], axis=1).ravel()
        return np.concatenate([pairs, [4096 * size**2, 4096.0]])
    if length == 1:
        return np.array([np.nan if broken else (3 * size) ** 2])
    count = 4096.0
    value = {"attention_entropy": 3.0, "router_entropy": 1.5}.get(statistic)
    if value is not None:
        return np.array([count * value * (1 + 0.01 * draw.standard_normal()), count])
    if statistic == "update_ratio":
        return np.array([1e-6 * size, 9 * size])
    return np.array([np.nan if broken else count * size**2, count])


def _after(path: str, start: str) -> bool:
    """Whether ``path`` is computed at ``start`` or after it; layers of one digit."""
    inner = {"self_attention": 0, "mlp": 1}

    def key(text: str) -> tuple[int, int]:
        names = text.split(".")
        if names[0] == "decoder" and len(names) > 2:
            return int(names[2]), inner.get(names[3], 2) if len(names) > 3 else 2
        return (-1, 0) if names[0] == "embedding" else (99, 0)

    return key(path) >= key(start)


def loss_of(shape: RunShape, step: int) -> float:
    noise = 0.02 * float(_noise(shape.seed, "loss", step).standard_normal())
    if shape.nan_at is not None and step >= shape.nan_at:
        return math.nan
    differs = 0.01 if shape.differs_from is not None and step >= shape.differs_from else 0.0
    return 2.0 + 6.0 * math.exp(-step / 120) + noise + differs


def step_frame(shape: RunShape, rank: int, step: int) -> Frame:
    last = coordinates(shape, rank)["pp"] == shape.pp - 1
    draw = _noise(shape.seed, "step", rank, step)
    seconds = 0.25 + 0.01 * float(draw.random())
    return {
        "k": "step",
        "i": step,
        "t": START_NS + int(step * 0.26e9) + rank * 1000,
        "seconds": seconds,
        "loss": loss_of(shape, step) if last else math.nan,
        "grad_norm": 1.0 + 0.2 * float(_noise(shape.seed, "norm", step).random()),
        "lr": 3e-4 * min(1.0, step / 50),
        "tokens": 4096,
        "tokens_per_second": 4096 / 0.26,
        "memory_bytes": (6 << 30) + rank * (1 << 20),
        "skipped": False,
        "perturbed": perturbed_at(shape, step),
        "attempt": 0,
    }


def perturbed_at(shape: RunShape, step: int) -> str | None:
    if shape.perturbed is None or not shape.perturbed[0] <= step <= shape.perturbed[1]:
        return None
    return "noise on decoder.layers.1.mlp (sigma 0.1)"


def stats_frame(shape: RunShape, rank: int, step: int) -> Frame:
    entries = entries_of(shape, coordinates(shape, rank)["pp"])
    parts = [part_of(shape, rank, step, path, name, length) for path, name, length in entries]
    return {
        "k": "stats",
        "i": step,
        "id": 1,
        "values": np.concatenate(parts),
        "perturbed": perturbed_at(shape, step),
        "attempt": 0,
    }


def activation(shape: RunShape, step: int, layer: int) -> NDArray[np.float32]:
    """Output of a layer for one sample, [tokens, hidden]; a few channels stand out."""
    draw = _noise(shape.seed, "activation", step, layer)
    values = draw.standard_normal((shape.tokens, shape.hidden)).astype(np.float32)
    values[:, [3, 17 % shape.hidden]] *= 12
    return values


def attention_map(shape: RunShape, step: int, head: int) -> NDArray[np.float32]:
    """Causal attention [tokens, tokens]: the first token, near ones, and a stripe far back; rows sum to 1."""
    size = shape.attention_tokens
    row = np.arange(size, dtype=np.float32)[:, None]
    column = np.arange(size, dtype=np.float32)[None, :]
    away = np.maximum(row - column, 0)
    values = np.exp(-away / (16.0 + 64.0 * head)) + 0.3 * np.exp(-np.abs(away - size / 4) / 8)
    values[:, 0] += 1.0
    values *= row >= column
    values *= 1 + 0.2 * np.sin(row / 37 + step)
    return (values / values.sum(axis=1, keepdims=True)).astype(np.float32)


def quantised(values: NDArray[np.float32], rows: int, columns: int) -> dict[str, Any]:
    """8-bit tiles of at most ``rows`` x ``columns`` of a matrix, with the largest error: of n tiles along d
    elements each has ceil(d / n)."""
    high, wide = -(-values.shape[0] // rows), -(-values.shape[1] // columns)
    rows, columns = -(-values.shape[0] // high), -(-values.shape[1] // wide)
    padded = np.pad(
        values, ((0, high * rows - values.shape[0]), (0, wide * columns - values.shape[1])), "edge"
    )
    tiles = padded.reshape(high, rows, wide, columns)
    low = tiles.min(axis=(1, 3)).astype(np.float32)
    scale = ((tiles.max(axis=(1, 3)) - low) / 255).astype(np.float32)
    safe = np.where(scale > 0, scale, 1)
    codes = np.rint((tiles - low[:, None, :, None]) / safe[:, None, :, None]).clip(0, 255).astype(np.uint8)
    back = low[:, None, :, None] + scale[:, None, :, None] * codes.astype(np.float32)
    matrix = codes.reshape(padded.shape)[: values.shape[0], : values.shape[1]]
    return {
        "encoding": "q8",
        "data": np.ascontiguousarray(matrix),
        "scale": scale,
        "low": low,
        "error": float(np.abs(back - tiles).max()),
    }


def tensor_frames(shape: RunShape, rank: int, step: int) -> Iterator[tuple[Frame, NDArray[Any]]]:
    """Shards that ``rank`` sends, and what each says about the whole tensor."""
    at = coordinates(shape, rank)
    if at["dp"]:
        return
    common = {"k": "tensor", "i": step, "microbatch": 0, "perturbed": perturbed_at(shape, step), "attempt": 0}
    for layer in layers_of(shape, at["pp"]):
        whole = activation(shape, step, layer)
        each = shape.hidden // shape.tp
        left = at["tp"] * each
        part = np.ascontiguousarray(whole[:, left : left + each])
        plain = {"encoding": "f32", "data": part, "scale": None, "low": None, "error": 0.0}
        body = quantised(part, 32, each) if layer % 2 else plain
        path = f"decoder.layers.{layer}"
        yield (
            {
                **common,
                **body,
                "path": path,
                "what": "activation",
                "index": {"sample": 0},
                "shape": list(whole.shape),
                "offset": [0, left],
            },
            whole,
        )
        if shape.attention_tokens and layer < shape.attention_layers:
            for head in range(at["tp"], shape.attention_heads, shape.tp):
                yield from _attention_frames(shape, step, layer, head, common)


def _attention_frames(
    shape: RunShape, step: int, layer: int, head: int, common: Frame
) -> Iterator[tuple[Frame, NDArray[Any]]]:
    """A map in blocks of rows, as a rank sends what exceeds a frame."""
    whole = attention_map(shape, step, head)
    block = min(1024, shape.attention_tokens)
    for top in range(0, len(whole), block):
        yield (
            {
                **common,
                **quantised(whole[top : top + block], 64, whole.shape[1]),
                "path": f"decoder.layers.{layer}.self_attention",
                "what": "attention",
                "index": {"head": head, "sample": 0},
                "shape": list(whole.shape),
                "offset": [top, 0],
            },
            whole,
        )


def token_arrays(shape: RunShape, step: int, data_rank: int) -> dict[str, NDArray[Any]]:
    draw = _noise(shape.seed, "tokens", step, data_rank)
    ids = draw.integers(0, 512, shape.tokens)
    loss = np.abs(loss_of(shape, step) + draw.standard_normal(shape.tokens)).astype(np.float32)
    top = draw.integers(0, 512, (shape.tokens, shape.best))
    logprobs = -np.sort(draw.random((shape.tokens, shape.best)) * 6).astype(np.float32)
    entropy = (2 + draw.random(shape.tokens)).astype(np.float32)
    return {"ids": ids, "loss": loss, "entropy": entropy, "top_ids": top, "top_logprobs": logprobs}


def token_frames(shape: RunShape, rank: int, step: int) -> Iterator[Frame]:
    """Two pieces of the sequence, as context-parallel ranks send them, from the last stage's first rank."""
    at = coordinates(shape, rank)
    if at["tp"] or at["pp"] != shape.pp - 1:
        return
    arrays = token_arrays(shape, step, at["dp"])
    half = shape.tokens // 2
    for piece in (slice(half, None), slice(0, half)):
        part = {name: array[piece] for name, array in arrays.items()}
        start = piece.start or 0
        about = {"k": "tokens", "i": step, "attempt": 0, "microbatch": 0, "sample": at["dp"]}
        yield {**about, "position": start, **part}


def frames_of(shape: RunShape, rank: int, step: int) -> Iterator[Frame]:
    """All that ``rank`` sends about ``step``."""
    if shape.interval and step % shape.interval == 0:
        yield stats_frame(shape, rank, step)
    if shape.tensor_every and step % shape.tensor_every == 0:
        yield from (frame for frame, _ in tensor_frames(shape, rank, step))
    if shape.token_every and step % shape.token_every == 0:
        yield from token_frames(shape, rank, step)
    yield step_frame(shape, rank, step)
    if shape.validation_every and step % shape.validation_every == 0 and rank == 0:
        yield {"k": "schema", "id": 7, "entries": [["", "validation_loss", 2]]}
        sums = np.asarray([validation_loss_of(shape, step) * 4096, 4096])
        yield {"k": "stats", "i": step, "id": 7, "attempt": 0, "values": sums, "perturbed": None}


def validation_loss_of(shape: RunShape, step: int) -> float:
    return loss_of(shape, step) + 0.25


def write_run(
    run: Path,
    shape: RunShape | None = None,
    *,
    retain_mib: int = 512,
    extras: bool = True,
    through_bytes: bool = True,
) -> Truth:
    """Write the recording of ``shape`` below ``run``; with ``extras`` alerts, drops, bookmarks and requests.

    ``through_bytes``: frames are encoded and decoded on their way, as over a socket.
    """
    shape = shape or RunShape()
    files = scope_files(run)
    files.root.mkdir(parents=True, exist_ok=True)
    ranks: dict[int, list[int]] = {}
    for rank in range(shape.world_size):
        ranks.setdefault(node_of(shape, rank), []).append(rank)
    for node, members in ranks.items():
        writer = Writer(
            files.node(f"node{node}", node), node=node, host=f"node{node}", retain_bytes=retain_mib << 20
        )
        greetings: list[tuple[int, Frame]] = []
        for rank in members:
            greetings += [(rank, hello(shape, rank)), (rank, schema(shape, rank))]
        writer.tick([(rank, _sent(frame, through_bytes)) for rank, frame in greetings])
        for step in range(shape.first_step, shape.first_step + shape.steps):
            writer.tick(
                [
                    (rank, _sent(frame, through_bytes))
                    for rank in members
                    for frame in frames_of(shape, rank, step)
                ]
            )
        last = shape.first_step + shape.steps - 1
        if extras:
            writer.tick([(members[0], {"k": "dropped", "frames": 12, "bytes": 34_000})])
            if node == 0:
                writer.requested(["attention@decoder.layers.*:heads=0"])
                _alerts(writer, shape, last)
        writer.tick([(rank, {"k": "bye"}) for rank in members])
        writer.close()
        if writer.stopped or (writer.lost and retain_mib > 64):
            raise AssertionError(f"node {node}: {writer.stopped}, {writer.lost} frames lost")
    if extras:
        add_bookmark(files, shape.first_step + shape.steps // 2, "halfway")
        write_requests(files, ["attention@decoder.layers.*:heads=0"])
    return truth_of(shape)


def _sent(frame: Frame, through_bytes: bool) -> Mapping[str, Any]:
    return decode(encode(frame)[4:]) if through_bytes else frame


def _alerts(writer: Writer, shape: RunShape, last: int) -> None:
    for step, value in ((last - 20, 91.0), (last - 10, 97.5)):
        writer.alert(
            Alert(
                step=step,
                kind="band",
                path="decoder.layers.1",
                statistic="activation_rms",
                value=value,
                low=0.8,
                high=1.6,
                text=f"activation_rms of decoder.layers.1 is {value:g}; its band is 0.8 to 1.6",
                time_ns=START_NS + step * 260_000_000,
            ),
            (shape.session, 0),
        )


def truth_of(shape: RunShape) -> Truth:
    """What a recording of ``shape`` must give, with arithmetic of its own."""
    truth = Truth(shape=shape)
    for step in range(shape.first_step, shape.first_step + shape.steps):
        truth.loss[step] = loss_of(shape, step)
        if shape.interval and step % shape.interval == 0:
            _statistics(truth, step)
        if shape.validation_every and step % shape.validation_every == 0:
            truth.values.setdefault(("", "validation_loss"), {})[step] = validation_loss_of(shape, step)
        for rank in range(shape.world_size):
            if shape.tensor_every and step % shape.tensor_every == 0:
                for frame, whole in tensor_frames(shape, rank, step):
                    key = (step, frame["path"], frame["what"], json.dumps(frame["index"], sort_keys=True))
                    truth.tensors[key] = whole
        if shape.token_every and step % shape.token_every == 0:
            for data_rank in range(shape.dp):
                truth.tokens[step, data_rank] = token_arrays(shape, step, data_rank)
    return truth


def _statistics(truth: Truth, step: int) -> None:
    """The formulas of the documentation, written out: no code of the package."""
    shape = truth.shape
    for stage in range(shape.pp):
        members = [rank for rank in range(shape.world_size) if coordinates(shape, rank)["pp"] == stage]
        for path, name, length in entries_of(shape, stage):
            parts = np.stack([part_of(shape, rank, step, path, name, length) for rank in members])
            total = parts.sum(axis=0)
            value: float
            vector: Floats | None = None
            if name in ("activation_max", "attention_logit_max"):
                value = float(parts.max())
            elif name in ("gradient_norm", "weight_norm"):
                value = math.sqrt(total[0])
            elif name == "not_finite":
                value = float(total[0] + total[1])
            elif name in ("attention_entropy", "router_entropy"):
                value = float(total[0] / total[1])
            elif name == "expert_load":
                value, vector = float(total.max() / total.mean()), total
                truth.values.setdefault((path, "dead_experts"), {})[step] = float((total == 0).sum())
                busy = float((total > 2 * total.mean()).sum())
                truth.values.setdefault((path, "overloaded_experts"), {})[step] = busy
            elif name == "loss_per_position":
                value, vector = float(total[:64].sum() / total[64:].sum()), total[:64] / total[64:]
            elif name == "outlier_channels":
                largest: dict[int, float] = {}
                for part in parts:
                    for index in range(16):
                        channel, size = int(part[2 * index]), float(part[2 * index + 1])
                        largest[channel] = max(size, largest.get(channel, 0.0))
                ordered = sorted(largest.items(), key=lambda pair: -pair[1])[:16]
                vector = np.asarray(ordered).ravel()
                value = ordered[0][1] / math.sqrt(total[32] / total[33])
            else:
                value = math.sqrt(total[0] / total[1])
            truth.values.setdefault((path, name), {})[step] = value
            if vector is not None:
                truth.vectors.setdefault((path, name), {})[step] = vector

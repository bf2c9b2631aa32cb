"""The ranks' side: tokens from the weights under training, and training that does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mt_megatron.checkpoint.load import load_weights
from mt_megatron.errors import ConfigError
from mt_megatron.scope.control import generate as generating
from mt_megatron.scope.control.generate import generate
from mt_megatron.scope.format.frames import decode, encode
from tests.parity.case import VOCABULARY
from tests.scope.lab import bench as benches
from tests.scope.lab.bench import bench, start
from tests.scope.lab.layout_cases import saved

PROMPT = [5, 17, 3, 99, 41, 8]


def layouts(folder: str, model: str, flags: dict[str, str]) -> dict[str, Any]:
    """For each layout the tokens of the same weights, and whether three steps afterwards are as without."""
    start()
    checkpoint = saved(folder, model)
    found: dict[str, Any] = {}
    for name, given in flags.items():
        with bench(f"{given} --vocab-size 4352", model=model) as run:
            load_weights(Path(checkpoint), run.trainable)
            run.step()
            states = []
            for _ in range(2):
                run.step()
                states.append(run.digest())
        with bench(f"{given} --vocab-size 4352", model=model) as run:
            load_weights(Path(checkpoint), run.trainable)
            told: list[Any] = []
            asked = {"ids": PROMPT, "n": 4, "temperature": 0, "report": 5, "attention": {"layers": [1]}}
            made = sent(generate(run.trainer, asked, told=told.append))
            drawn = generate(run.trainer, {"prompt": "5 17 3", "n": 6, "temperature": 1.5, "seed": 3})
            run.step()
            before = run.digest()
            again = generate(run.trainer, {"ids": PROMPT, "n": 2, "temperature": 0.7})
            untouched = run.digest() == before
            same = []
            for state in states:
                run.step()
                same.append(run.digest() == state)
            training = all(module.training for chunk in run.trainable.chunks for module in chunk.modules())
            found[name] = {
                "made": made,
                "told": [sent(each)["id"] for each in told],
                "drawn": [token["id"] for token in drawn["tokens"]],
                "again": [token["id"] for token in again["tokens"]],
                "text": drawn["text"],
                "untouched": untouched and training,
                "same": same,
            }
    return found


class Characters:
    """A tokenizer of bytes that sets a space between tokens from 100 on, and none at a text's beginning."""

    vocab_size = 4352
    eod = 0

    def decode(self, ids: Any) -> str:
        words = b"".join(b" w%d" % each if each >= 256 else bytes([each]) for each in ids)
        return words.removeprefix(b" ").decode(errors="replace")


def ends_early() -> dict[str, Any]:
    """What came of generations while the run was to end, and while a command waited; on each rank."""
    start()
    found: dict[str, Any] = {}
    with bench("--tensor-model-parallel-size 2 --vocab-size 4352") as run:
        asked = {"ids": PROMPT, "n": 6, "temperature": 0, "stop_at_end": False}
        found["whole"] = sent(generate(run.trainer, asked))
        told: list[Any] = []
        ends = {"stop": False}
        # One rank alone has heard the signal.
        run.trainer.wishes = lambda: (ends["stop"] and run.job.rank == 1, False)  # type: ignore[method-assign]

        def hear(token: Any) -> None:
            told.append(token["id"])
            ends["stop"] = len(told) == 2

        found["stopped"] = sent(generate(run.trainer, asked, told=hear))
        ends["stop"] = False
        if run.job.rank == 0:
            # Both are taken together: the second does not end the first.
            run.control.put({"id": "a", "do": "generate", "arguments": asked})
            run.control.put({"id": "b", "do": "resume", "arguments": {}})
        run.control.attend()
        answers = [frame for frame in run.frames if frame["id"] == "a"]
        found["together"] = sent(answers[0]["value"]) if answers else None
        run.frames.clear()
        tell = run.control._tell_token

        def resume(value: Any) -> None:
            tell(value)
            if value["number"] == 1 and run.job.rank == 0:
                run.control.put({"id": "c", "do": "resume", "arguments": {}})

        run.control._tell_token = resume  # type: ignore[method-assign]
        if run.job.rank == 0:
            run.control.put({"id": "d", "do": "generate", "arguments": asked})
        run.control.attend()
        answers = [frame for frame in run.frames if frame["id"] == "d"]
        found["resumed"] = sent(answers[0]["value"]) if answers else None
    return found


def sent(value: Any) -> Any:
    """``value`` as the page gets it: through a frame."""
    frame = {"k": "result", "id": "1", "ok": True, "value": value, "error": None}
    return decode(encode(frame)[4:])["value"]


def deep_layouts(folder: str, model: str, flags: dict[str, str]) -> dict[str, Any]:
    """The same of four layers, without a checkpoint of two."""
    benches.FLAGS["deep"] = benches.FLAGS[model].replace("--num-layers 2", "--num-layers 4")
    return layouts(folder, "deep", flags)


def oracle(folder: str) -> dict[str, Any]:
    """Greedy tokens and attention of the small model, computed with numpy in float64 from its checkpoint."""
    start()
    checkpoint = saved(folder, "small")
    with bench("--vocab-size 4352") as run:
        load_weights(Path(checkpoint), run.trainable)
        weights = {
            name: parameter.detach().double().numpy()
            for name, parameter in run.trainable.bare_chunks()[0].named_parameters()
        }
    ids, tokens = list(PROMPT), []
    for _ in range(4):
        logits, attention = _forward(weights, ids)
        logits = logits[:VOCABULARY]
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        top = np.argsort(-probabilities, kind="stable")[:5]
        tokens.append(
            {
                "id": int(top[0]),
                "top_ids": top.tolist(),
                "top_probabilities": probabilities[top].tolist(),
                "entropy": float(-(probabilities * np.log(probabilities)).sum()),
                "attention": attention.tolist(),
            }
        )
        ids.append(int(top[0]))
    return {"tokens": tokens}


def _forward(weights: dict[str, Any], ids: list[int]) -> tuple[Any, Any]:
    """Logits of the last token, and attention of the second layer's heads."""
    hidden, heads, groups, size = 32, 4, 2, 8
    x = weights["embedding.word_embeddings.weight"][ids]
    attention = None
    for layer in range(2):
        prefix = f"decoder.layers.{layer}."
        normed = _norm(x, weights[f"{prefix}input_layernorm.weight"])
        mixed = normed @ weights[f"{prefix}self_attention.linear_qkv.weight"].T
        mixed = mixed.reshape(len(ids), groups, heads // groups + 2, size)
        query = _rotated(mixed[:, :, : heads // groups].reshape(len(ids), heads, size))
        key = _rotated(mixed[:, :, -2]).repeat(heads // groups, axis=1)
        value = mixed[:, :, -1].repeat(heads // groups, axis=1)
        logits = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(size)
        logits = np.where(np.tril(np.ones((len(ids), len(ids)), dtype=bool)), logits, -np.inf)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        attention = shares[:, -1]
        context = np.einsum("hqk,khd->qhd", shares, value).reshape(len(ids), hidden)
        x = x + context @ weights[f"{prefix}self_attention.linear_proj.weight"].T
        normed = _norm(x, weights[f"{prefix}pre_mlp_layernorm.weight"])
        gate, up = np.split(normed @ weights[f"{prefix}mlp.linear_fc1.weight"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}mlp.linear_fc2.weight"].T
    x = _norm(x, weights["decoder.final_layernorm.weight"])
    output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return x[-1] @ output.T, attention


def _norm(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _rotated(x: Any) -> Any:
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), 500000.0 ** (-np.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        axis=-1,
    )


def refused() -> list[str]:
    """Errors of requests that make no sense; each leaves training as it was."""
    start()
    found = []
    with bench("") as run:
        run.step()
        before, state = run.digest(), torch.get_rng_state()
        for given in (
            {},
            {"ids": [1], "prompt": "1"},
            {"ids": []},
            {"ids": [VOCABULARY]},
            {"ids": [1] * 30, "n": 10},
            {"ids": [1], "n": 0},
            {"ids": [1], "temperature": -1},
            {"ids": [1], "top_k": "all"},
            {"ids": [1], "attention": {"layer": 1}},
            {"ids": [1], "attention": {"layers": [2]}},
            {"ids": [1], "attention": {"layers": [0], "heads": [4]}},
            {"ids": [1], "beam": 4},
        ):
            try:
                generate(run.trainer, given)
            except ConfigError as error:
                found.append(str(error))
        made, generating.MOST_ATTENTION = generating.MOST_ATTENTION, 100
        try:
            generate(run.trainer, {"ids": [1], "n": 5, "attention": {"layers": [0]}})
        except ConfigError as error:
            found.append(str(error))
        finally:
            generating.MOST_ATTENTION = made
        assert run.digest() == before and torch.equal(state, torch.get_rng_state())
    return found

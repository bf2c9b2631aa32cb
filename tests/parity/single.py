"""What the tests with one process ask of the model itself: published weights, logits, causality."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.checkpoint.load import load_weights
from mt_megatron.convert.tensors.table import Sizes, from_megatron, to_megatron
from mt_megatron.models.families import family_of
from mt_megatron.planning.parameters import padded_vocab_size
from mt_megatron.training.distributed import joined
from mt_megatron.training.model import build
from tests.parity.case import SEQUENCE, VOCABULARY, Layout, config_of, training_data
from tests.parity.compare import Record, read_record
from tests.parity.huggingface import hugging_face_model, train_hugging_face
from tests.parity.run import run_layouts


def _sizes(config: Any) -> Sizes:
    padded = padded_vocab_size(
        config.model.vocab_size, divisible_by=config.model.make_vocab_size_divisible_by, tensor_parallel=1
    )
    return Sizes.of(config, padded)


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


def logits_beside_hugging_face(seed: int) -> dict[str, float]:
    """Largest differences between the two models' logits, and of a round trip of the weights."""
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    config = config_of(Layout(name="one"), seed=seed)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        ours = family.build_model(config, job.layout)[0].eval()
        table, sizes = family.convert_table(config), _sizes(config)
        published = from_megatron(ours.state_dict(), table, sizes)
        theirs = hugging_face_model(config, published).eval()
        tokens = torch.randint(VOCABULARY, (4, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            a, b = ours(tokens, _positions(tokens), None), theirs(tokens).logits
        back = to_megatron(published, table, sizes)
        same = all(torch.equal(value, ours.state_dict()[name]) for name, value in back.items())
        return {
            "difference": (a - b).abs().max().item(),
            "scale": b.abs().max().item(),
            "round_trip": float(same),
        }


def floating_point_operations(seed: int) -> dict[str, float]:
    """The family's figure for a training step's token, and a third of it counted by torch on the other
    model: forward is a third of forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    config = config_of(Layout(name="one"), seed=seed)
    theirs = hugging_face_model(config, None)
    tokens = torch.zeros(2, SEQUENCE, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        theirs(tokens)
    return {
        "ours": family_of(config).flops(config),
        "counted": 3 * counter.get_total_flops() / tokens.numel(),
    }


def causality(seed: int) -> dict[str, Any]:
    """Change the token at each position in turn: does any earlier logit change, and does any later one?"""
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    config = config_of(Layout(name="one"), seed=seed)
    earlier, later = [], []
    with joined(config, mt_megatron.backend()) as job, torch.no_grad():
        model = family_of(config).build_model(config, job.layout)[0].eval()
        tokens = torch.randint(VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(seed))
        before = model(tokens, _positions(tokens), None)
        for position in range(SEQUENCE):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % VOCABULARY
            difference = (model(changed, _positions(tokens), None) - before).abs().amax(dim=(0, 2))
            earlier.append(difference[:position].max().item() if position else 0.0)
            later.append(difference[position:].min().item())
    return {"earlier": max(earlier), "later": min(later)}


def training_beside_hugging_face(folder: str, seed: int) -> dict[str, Any]:
    """Both train on the same tokens from the same weights with the same settings, each by its own code."""
    results = run_layouts(["one"], folder, seed, False)
    record = read_record(Path(folder) / "fp32" / "one", [results["one"]])
    config = config_of(Layout(name="one"), seed=seed)
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        load_weights(Path(folder) / "initial" / "iter_0000000", trainable)
        table, sizes = family.convert_table(config), _sizes(config)
        model = hugging_face_model(
            config, from_megatron(trainable.bare_chunks()[0].state_dict(), table, sizes)
        )
        losses, norms, gradients = train_hugging_face(model, config, training_data(seed))
        packed = to_megatron(gradients, table, sizes)
    worst = max(
        ((_recorded(record, name) - gradient).abs().max() / gradient.abs().max()).item()
        for name, gradient in packed.items()
    )
    return {"ours": record.losses, "theirs": losses, "norms": [record.norms, norms], "gradient": worst}


def _recorded(record: Record, name: str) -> torch.Tensor:
    """The gradient of an unsharded model's parameter: checkpoints stack layers and rename two norms."""
    if not name.startswith("decoder.layers."):
        return record.gradients[name]
    _, _, layer, rest = name.split(".", 3)
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return record.gradients[f"decoder.layers.{rest}"][int(layer)]

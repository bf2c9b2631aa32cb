"""What the ranks of ``test_mtp.py`` run; each function returns JSON-able results."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.layers.mtp import layout_ranks as mtp_layout_ranks
from tests.layers.mtp import oracle as mtp_oracle
from tests.layers.mtp import small_model as mtp_model
from tests.layers.mtp.layout_ranks import MICROBATCHES
from tests.patches import small_gpt
from tests.patches.small_gpt import BATCH, SEQUENCE

SHAPE = mtp_oracle.Shape(
    layers=mtp_model.LAYERS, heads=4, groups=2, depths=mtp_model.DEPTHS, factor=mtp_model.FACTOR
)


def _documents(kind: str) -> torch.Tensor:
    number = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    if kind != "one":
        number[0, 3:], number[0, 4:], number[1, 6:] = 1, 2, 1
    return number


def _example(kind: str, masked: bool) -> mtp_oracle.Example:
    data = mtp_model.batches(1, masked=masked)[0]
    return mtp_oracle.Example(
        tokens=data["tokens"],
        labels=data["labels"],
        mask=data["mask"],
        documents=_documents(kind),
        apart=kind in ("mask", "borders"),
    )


def _told(kind: str, example: mtp_oracle.Example) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions and what stands in the mask's place, as a loader gives them."""
    from mt_megatron.layers.attention import packed_sequences as packed

    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    flat = example.documents + 100 * torch.arange(BATCH)[:, None]
    lengths = torch.unique_consecutive(flat.flatten(), return_counts=True)[1]
    borders = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    if kind == "positions":
        return packed.document_positions(borders, BATCH), None
    if kind == "mask":
        return positions, packed.document_mask(borders, BATCH, torch.device("cpu"))
    return positions, borders if kind == "borders" else None


def _compared(model: Any, expected: list[torch.Tensor], weights: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, relative to its norm."""
    mtp_oracle.total(expected, SHAPE).backward()
    names = {"embedding": "embedding.word_embeddings.weight", "output": "output_layer.weight"}
    parameters = mtp_model.whole_names([model])
    errors = []
    for name, weight in weights.items():
        assert weight.grad is not None
        if name == "output" and model.share_embeddings_and_output_weights:
            continue
        found = parameters[names.get(name, name)].grad.double()
        errors.append(float((found - weight.grad).norm() / weight.grad.norm()))
    return max(errors)


def alone(folder: str) -> dict[str, Any]:
    """All of the below, and the gradients that layouts are compared with, in one process."""
    import mt_megatron

    without = digests(without=True)
    mt_megatron.unpatch()
    return {
        "without": without,
        "off": digests(without=False),
        "oracle": beside_the_oracle(),
        "over_microbatches": over_microbatches(),
        "by_later_names": by_later_names(),
        "never_taken": never_taken(),
        "reference": mtp_layout_ranks.reference(folder),
    }


def beside_the_oracle() -> dict[str, Any]:
    """Losses and gradients of one process for each way to say what counts, and the oracle's."""
    small_gpt.start()
    found: dict[str, Any] = {}
    for kind in ("one", "positions", "mask", "borders"):
        for tied in (False, True):
            for masked in (True, False) if kind == "one" else (True,):
                found[f"{kind}, {'tied' if tied else 'untied'}, {'masked' if masked else 'all'}"] = _beside(
                    kind, tied, masked
                )
    found["labels in place of tokens"] = _beside("one", False, True, tokens=False)
    found["no mask given"] = _beside("one", False, True, mask_given=False)
    found["negative: mask not shifted"] = _beside("one", False, True, shift_mask=False)
    return found


def _beside(
    kind: str,
    tied: bool,
    masked: bool,
    *,
    tokens: bool = True,
    mask_given: bool = True,
    shift_mask: bool = True,
) -> dict[str, Any]:
    (model,) = mtp_model.build(mtp_model.config(), tied=tied)
    mtp_model.set_weights([model])
    example = _example(kind, masked)
    positions, mask = _told(kind, example)
    if not tokens:
        # As in Megatron-LM's batches on the last stage; one stage needs its tokens for itself.
        positions, embedded = positions, model.embedding(example.tokens, positions)
        losses = model(
            None, None, None, decoder_input=embedded, labels=example.labels, loss_mask=example.mask
        )
    else:
        given = {"loss_mask": example.mask} if mask_given else {}
        losses = model(example.tokens, positions, mask, labels=example.labels, **given)
    main = (losses * example.mask).sum() / example.mask.sum()
    main.backward()
    sums = model.mtp.take_reported()
    weights = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in mtp_model.whole_names([model]).items()
    }
    weights["embedding"] = weights.pop("embedding.word_embeddings.weight")
    weights["output"] = weights["embedding"] if tied else weights.pop("output_layer.weight")
    expected = mtp_oracle.losses(weights, SHAPE, example, shift_mask=shift_mask)
    reported = [float(main.detach()), *(sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()]
    return {
        "reported": reported,
        "expected": [float(each.detach()) for each in expected],
        "counted": sums[:, 1].tolist(),
        "gradients": _compared(model, expected, weights),
    }


def digests(without: bool) -> dict[str, Any]:
    """What a model without depths is made of and computes; ``without`` leaves out this concern's patches."""
    import hashlib

    import mt_megatron
    from mt_megatron.backends import registry
    from mt_megatron.patches import collect

    features = {patch.feature for patch in collect(registry.get("cpu"))}
    small_gpt.start(**({"features": sorted(features - {"mtp"})} if without else {}))
    transformer = mtp_model.config(mtp_num_layers=None)
    chunks = mtp_model.build(transformer)
    made = hashlib.sha256()
    for name, parameter in chunks[0].named_parameters():
        made.update(name.encode() + parameter.detach().numpy().tobytes())
    state = torch.get_rng_state().numpy().tobytes()
    reports = mtp_model.train(chunks, transformer, mtp_model.batches(MICROBATCHES))
    learnt = hashlib.sha256()
    for name, parameter in chunks[0].named_parameters():
        learnt.update(name.encode() + parameter.main_grad.numpy().tobytes())
    return {
        "names": [name for name, _ in chunks[0].named_parameters()],
        "keys": sorted(chunks[0].sharded_state_dict()),
        "made": made.hexdigest(),
        "random": hashlib.sha256(state).hexdigest(),
        "losses": [report["loss"].hex() for report in reports],
        "learnt": learnt.hexdigest(),
        "patched": any(row.id.startswith("mtp.") for row in mt_megatron.report().applied),
    }


def by_later_names() -> dict[str, Any]:
    """``get_gpt_mtp_block_spec`` and ``mtp_block_spec``, with their errors."""
    from mt_megatron.errors import ConfigError

    small_gpt.start()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    data = mtp_model.batches(1)[0]

    def losses(depths: int | None, **given: Any) -> list[float]:
        transformer = mtp_model.config(mtp_num_layers=depths)
        model = GPTModel(
            transformer, layer, small_gpt.VOCABULARY, SEQUENCE, position_embedding_type="rope", **given
        )
        mtp_model.set_weights([model])
        model(data["tokens"], data["positions"], None, labels=data["labels"]).sum().backward()
        found: list[float] = model.mtp.take_reported().flatten().tolist()
        return found

    def error(make: Any) -> str:
        try:
            make()
        except ConfigError as found:
            return str(found)
        return "no error"

    two = gpt_layer_specs.get_gpt_mtp_block_spec(mtp_model.config(), layer, use_transformer_engine=False)
    with mock.patch.object(parallel_state, "is_pipeline_last_stage", lambda: False):
        elsewhere = gpt_layer_specs.get_gpt_mtp_block_spec(mtp_model.config(), layer, False)
    empty = TransformerBlockSubmodules(layer_specs=[], layer_norm=gpt_layer_specs.LNImpl)
    return {
        "equal": losses(2, mtp_block_spec=two) == losses(2),
        "none_elsewhere": elsewhere is None,
        "empty": error(lambda: gpt_layer_specs.get_gpt_mtp_block_spec(mtp_model.config(), empty, False)),
        "depths": error(lambda: losses(1, mtp_block_spec=two)),
        "no depths": error(lambda: losses(None, mtp_block_spec=two)),
    }


def never_taken() -> dict[str, Any]:
    """Sums that a block keeps when nobody asks for its losses, and their total in the end."""
    small_gpt.start()
    (model,) = mtp_model.build(mtp_model.config())
    reports = torch.rand(2500, 2, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    kept = 0
    for sums in reports:
        expected += sums
        model.mtp.report(sums)
        kept = max(kept, len(model.mtp._reported))
    return {
        "kept": kept,
        "equal": torch.equal(model.mtp.take_reported(), expected),
        "again": model.mtp.take_reported(),
    }


def over_microbatches() -> dict[str, float]:
    """Errors of a whole step's gradients, where micro-batches or their tokens weigh the same."""
    small_gpt.start()
    found = {}
    for name in ("untied", "per token"):
        transformer = mtp_model.config(**mtp_layout_ranks.MODELS[name])
        (model,) = mtp_model.build(transformer)
        mtp_model.set_weights([model])
        data = mtp_model.batches(MICROBATCHES)
        counts = torch.stack([each["mask"].sum() for each in data]).double()
        shares = counts / counts.sum() if name == "per token" else torch.ones(len(data)) / len(data)
        weights = {
            each: parameter.detach().double().requires_grad_()
            for each, parameter in mtp_model.whole_names([model]).items()
        }
        mtp_model.train([model], transformer, data)
        named = {
            **weights,
            "embedding": weights["embedding.word_embeddings.weight"],
            "output": weights["output_layer.weight"],
        }
        for share, each in zip(shares, data, strict=True):
            example = mtp_oracle.Example(
                tokens=each["tokens"],
                labels=each["labels"],
                mask=each["mask"],
                documents=_documents("one"),
                apart=False,
            )
            (share * mtp_oracle.total(mtp_oracle.losses(named, SHAPE, example), SHAPE)).backward()
        found[name] = max(
            float((parameter.main_grad.double() - weights[each].grad).norm() / weights[each].grad.norm())
            for each, parameter in mtp_model.whole_names([model]).items()
        )
    return found

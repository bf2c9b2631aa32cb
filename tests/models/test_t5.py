"""T5 of Megatron-Core 0.9.0, from both layer specs, is the model written out in plain torch, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks
from tests.models.t5_case import SPECS

HERE = "tests.models.test_t5"


def compared(spec: str, tied: bool) -> dict[str, float]:
    """Largest differences from the reference, relative to its largest value; and those of references that
    leave a mask out."""
    import torch

    from tests.models import t5_case
    from tests.patches import small_gpt

    small_gpt.start()
    model = t5_case.build(spec, tied=tied).double()
    t5_case.fill(model)
    data = t5_case.batch()
    asked = {name: tensor for name, tensor in data.items() if name != "lm_labels"}
    kept = data["lm_labels"] >= 0
    logits = model(**asked, lm_labels=None)
    loss = t5_case.mean_loss(logits, data["lm_labels"])
    own = model(**data)[kept].mean().item()
    loss.backward()
    parameters = dict(model.named_parameters())
    w = {
        t5_case.local_name(name): parameter.detach().clone().requires_grad_()
        for name, parameter in parameters.items()
    }
    expected = t5_case.reference(w, data)
    expected_loss = t5_case.mean_loss(expected, data["lm_labels"])
    expected_loss.backward()

    def away(found: Any, wanted: Any) -> float:
        return float((found - wanted).abs().max() / wanted.abs().max())

    def without(name: str) -> float:
        altered = {**data, name: torch.zeros_like(data[name])}
        return away(t5_case.reference(w, altered)[kept].detach(), expected[kept].detach())

    found = torch.cat([parameter.grad.flatten() for parameter in parameters.values()])
    wanted = torch.cat([w[t5_case.local_name(name)].grad.flatten() for name in parameters])
    return {
        "logits": away(logits[kept].detach(), expected[kept].detach()),
        "loss": abs(loss.item() / expected_loss.item() - 1),
        "own loss": abs(own / expected_loss.item() - 1),
        "gradients": away(found, wanted),
        **{name: without(name) for name in data if name.endswith("mask")},
    }


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.daily)])
def test_a_t5_is_the_model_written_out(spec: str, tied: bool) -> None:
    [found] = run_ranks(1, f"{HERE}:compared", spec, tied)
    assert found["logits"] < 1e-10 and found["loss"] < 1e-10 and found["gradients"] < 1e-10, found
    # Megatron-Core's cross entropy computes in fp32: of its sum over the vocabulary, some roundings.
    assert found["own loss"] < 1e-6, found
    for name in ("encoder_attn_mask", "decoder_attn_mask", "encoder_decoder_attn_mask"):
        assert found[name] > 1e-3, f"negative control: without the {name} it is another model ({found})"

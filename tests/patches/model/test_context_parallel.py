"""A script that only uses Megatron-Core's API gets context parallelism from the patches alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import run_ranks

HERE = "tests.patches.model.test_context_parallel:"


def script(cp: int) -> dict[str, list[float]]:
    """Losses and gradients of a GPT on this rank's tokens, as a script of Megatron-LM's would do it:
    it cuts the batch by itself, sums the loss over the group and multiplies it by its size."""
    import torch
    import torch.distributed as dist

    from tests.patches import small_gpt

    small_gpt.start(cp=cp)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def cut(value: torch.Tensor, dim: int) -> torch.Tensor:
        rank = parallel_state.get_context_parallel_rank()
        value = value.view(*value.shape[:dim], 2 * cp, -1, *value.shape[dim + 1 :])
        value = value.index_select(dim, torch.tensor([rank, 2 * cp - 1 - rank]))
        return value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])

    found = {}
    for name in ("local spec", "upstream's class", "mask", "per token"):
        config = small_gpt.transformer_config(
            context_parallel_size=cp, calculate_per_token_loss=name == "per token"
        )
        spec = get_gpt_layer_local_spec()
        if name == "upstream's class":
            spec.submodules.self_attention.submodules.core_attention = DotProductAttention
        model = GPTModel(
            config, spec, small_gpt.VOCABULARY, small_gpt.SEQUENCE, position_embedding_type="rope"
        )
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(small_gpt.full_weight(key, parameter, 1))
        chunk = small_gpt.distributed(config, model)
        future = torch.ones(8, 8, dtype=torch.bool).triu(1).expand(2, 1, 8, 8)
        losses = []

        def step(batches: Any, model: Any) -> Any:
            data = next(batches)
            mask = cut(future, 2) if name == "mask" else None  # noqa: B023
            tokens, positions, labels = (cut(data[key], 1) for key in ("tokens", "positions", "labels"))
            output = model(tokens, positions, mask, labels=labels)
            weight = (tokens % 3 > 0).float().flatten()

            def loss(output: torch.Tensor) -> Any:
                both = torch.stack([(output.flatten() * weight).sum(), weight.sum()])
                if cp > 1:
                    dist.all_reduce(both, group=parallel_state.get_context_parallel_group())
                losses.append(float(both[0].detach()))  # noqa: B023
                return both[0] * cp, both[1].detach().to(torch.int), {}

            return output, loss

        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([small_gpt.batch(0), small_gpt.batch(1)]),
            model=[chunk],
            num_microbatches=2,
            seq_length=small_gpt.SEQUENCE,
            micro_batch_size=2,
        )
        gradients = torch.cat([p.main_grad.flatten() for p in model.parameters()])
        found[name] = [*losses, float(gradients.norm()), *gradients[::500].tolist()]
    return found


def test_a_script_of_its_own_equals_one_process() -> None:
    (expected,) = run_ranks(1, HERE + "script", 1)
    for found in run_ranks(2, HERE + "script", 2):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    # The micro-batches count different numbers of tokens, or the two ways of weighing were one.
    assert expected["per token"][2] != pytest.approx(expected["local spec"][2], rel=1e-3)

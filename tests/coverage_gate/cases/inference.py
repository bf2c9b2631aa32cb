"""Text generation with a key-value cache gives what the whole forward pass gives, also over two stages."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from tests.coverage_gate import models
from tests.coverage_gate.case import case
from tests.coverage_gate.target import DEVICE, torch


def _wrapped(model: Any, threshold: int) -> Any:
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )

    return GPTInferenceWrapper(
        model,
        InferenceWrapperConfig(
            hidden_size=16,
            params_dtype=torch.float32,
            inference_batch_times_seqlen_threshold=threshold,
            padded_vocab_size=models.VOCABULARY,
        ),
    )


def _generate(model: Any, prompts: list[list[int]], threshold: int = 1000) -> list[Any]:
    """Four greedy tokens for each prompt."""
    from megatron.core.inference.common_inference_params import CommonInferenceParams
    from megatron.core.inference.inference_request import InferenceRequest, Status
    from megatron.core.inference.text_generation_controllers.simple_text_generation_controller import (
        SimpleTextGenerationController,
    )

    tokenizer = SimpleNamespace(
        vocab_size=models.VOCABULARY,
        eod=models.VOCABULARY - 1,
        detokenize=lambda ids: " ".join(map(str, ids)),
    )
    options = CommonInferenceParams(top_k=1, return_log_probs=True, num_tokens_to_generate=4)
    requests = OrderedDict(
        (
            index,
            InferenceRequest(
                request_id=str(index),
                prompt="",
                inference_parameters=options,
                prompt_tokens=list(prompt),
                arrival_time=0.0,
                status=Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
            ),
        )
        for index, prompt in enumerate(prompts)
    )
    controller = SimpleTextGenerationController(_wrapped(model, threshold), tokenizer)
    done = controller.generate_all_output_tokens_static_batch(requests)
    assert all(request.status is Status.COMPLETED for request in done.values())
    return list(done.values())


_PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]


@case(world=1)
def greedy_generation_equals_the_whole_forward_pass() -> None:
    model = models.gpt(models.config(), parallel_output=False)
    # Fresh weights give nearly equal logits; larger ones make the greedy choice unmistakable.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(20)
    results = _generate(model, _PROMPTS)
    for prompt, result in zip(_PROMPTS, results, strict=True):
        tokens = list(prompt)
        for _ in range(4):
            ids = torch.tensor([tokens])
            mask = torch.ones(len(tokens), len(tokens)).triu(1).bool()[None, None]
            logits = model(ids, models.positions(ids), mask)
            tokens.append(int(logits[0, -1].argmax()))
        assert result.generated_tokens.tolist() == tokens[len(prompt) :], (result.generated_tokens, tokens)
        assert result.generated_tokens.device.type == DEVICE and result.generated_length == 4
        assert (result.generated_log_probs <= 0).all()


@case(world=2, pp=2)
def generation_over_two_stages_small_and_large_batches() -> None:
    from megatron.core import parallel_state

    config = models.config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    model = models.gpt(
        config,
        parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    outcomes = []
    # A threshold of 1 cuts the batch into micro-batches, 1000 keeps it whole.
    for threshold in (1000, 1):
        outcomes.append([r.generated_tokens.tolist() for r in _generate(model, _PROMPTS, threshold)])
    assert outcomes[0] == outcomes[1]
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, outcomes)
    assert everywhere[0] == everywhere[1], "both stages must see the same tokens"


@case(world=2, pp=2)
def broadcast_from_the_last_stage() -> None:
    from megatron.core.inference.communication_utils import broadcast_from_last_pipeline_stage

    last = torch.distributed.get_rank() == 1
    sent = torch.arange(6.0).reshape(2, 3) if last else None
    received = broadcast_from_last_pipeline_stage([2, 3], torch.float32, sent)
    assert torch.equal(received, torch.arange(6.0).reshape(2, 3)) and received.device.type == DEVICE
    if last:
        try:
            broadcast_from_last_pipeline_stage([2, 3], torch.float32, torch.empty(2, 3, device="meta"))
        except AssertionError:
            return
        raise AssertionError("a tensor on another device must be refused before it is sent")

"""Upstream's linears over the seam: tensor parallel layouts, fusion, deferral, DDP's hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launch import run_ranks

HERE = "tests.patches.model.test_linear"


def gradients(options: dict[str, Any]) -> Any:
    """One step of the small GPT: losses and whole gradients, the deferred ones flushed at the end."""
    from mt_megatron.seams import gemm
    from tests.patches import small_gpt

    small_gpt.start(tp=options.get("tp", 1))
    config = small_gpt.transformer_config(
        sequence_parallel=options.get("sequence_parallel", False),
        gradient_accumulation_fusion=options.get("fused", False),
        **options.get("config", {}),
    )
    model = small_gpt.distributed(
        config,
        small_gpt.build(config, share=options.get("share", False)),
        overlap_grad_reduce=options.get("overlap", False),
        grad_reduce_in_fp32=True,
    )
    rank, size = data_parallel()
    batches = [small_gpt.batch(seed) for seed in range(4)][rank::size]
    if not options.get("deferred"):
        return small_gpt.train_step(model, batches), small_gpt.whole_gradients(model.module)

    losses, finalize = [], config.finalize_model_grads_func
    with gemm.deferred_wgrad() as queue:

        def flush_and_finalize(chunks: Any, tokens: Any = None) -> None:
            assert len(queue) > 0
            assert not model.module.decoder.layers[0].mlp.linear_fc1.weight.main_grad.any()
            # As a zero-bubble schedule does it: all but the last micro-batch out of step with DDP.
            earlier = len(queue) * (len(batches) - 1) // len(batches)
            with model.no_sync():
                queue.flush(earlier)
            queue.flush()
            finalize(chunks, tokens)

        config.finalize_model_grads_func = flush_and_finalize
        losses = small_gpt.train_step(model, batches)
    return losses, small_gpt.whole_gradients(model.module)


def data_parallel() -> tuple[int, int]:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


@pytest.fixture(scope="module")
def reference() -> Any:
    """One process, upstream's own linear and attention: only the device and the norm are ours."""
    return dict(enumerate(run_ranks(1, f"{HERE}:upstream")[0]))


def upstream() -> Any:
    return [upstream_gradients(share) for share in (False, True)]


def upstream_gradients(share: bool) -> Any:
    from tests.patches import small_gpt

    small_gpt.start(features=["device", "collectives", "compat", "norm"])
    from megatron.core.tensor_parallel import layers

    assert layers.LinearWithGradAccumulationAndAsyncCommunication.__module__ == layers.__name__
    config = small_gpt.transformer_config()
    model = small_gpt.distributed(config, small_gpt.build(config, share=share))
    losses = small_gpt.train_step(model, [small_gpt.batch(seed) for seed in range(4)])
    return losses, small_gpt.whole_gradients(model.module)


def compare(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    losses = [loss for rank_losses, _ in found for loss in rank_losses]
    unique = sorted({round(loss, 6) for loss in losses})
    assert unique == pytest.approx(sorted({round(loss, 6) for loss in expected[0]}), rel=1e-5)
    for _, gradients in found:
        assert gradients.keys() == expected[1].keys()
        for name, gradient in gradients.items():
            mine, theirs = torch.tensor(gradient), torch.tensor(expected[1][name])
            error = float((mine - theirs).norm() / theirs.norm())
            assert error < tolerance, (name, error)


LAYOUTS = {
    "one process": {},
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sequence_parallel": True},
    "dp2 overlap": {"overlap": True},
    "tp2 shared embedding": {"tp": 2, "share": True, "overlap": True},
}
MODES = {
    "at once": {},
    "fused": {"fused": True},
    "deferred": {"deferred": True},
    "deferred and fused": {"deferred": True, "fused": True},
}


def all_gradients(layouts: list[str]) -> Any:
    return [[gradients({**LAYOUTS[layout], **mode}) for mode in MODES.values()] for layout in layouts]


@pytest.fixture(scope="module")
def found() -> Any:
    """Layout -> mode -> what each rank has; one job of each size runs them all."""
    results = {}
    for world, layouts in ((1, ["one process"]), (2, [name for name in LAYOUTS if name != "one process"])):
        ranks = run_ranks(world, f"{HERE}:all_gradients", layouts, timeout=240)
        for i, layout in enumerate(layouts):
            results[layout] = {mode: [rank[i][j] for rank in ranks] for j, mode in enumerate(MODES)}
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_upstreams(layout, mode, found, reference):
    compare(found[layout][mode], reference[LAYOUTS[layout].get("share", False)])


def test_comparison_notices_a_lost_gradient(found, reference):
    """Negative control: without one weight's gradient the test above fails."""
    losses, gradients = found["one process"]["at once"][0]
    broken = dict(gradients)
    name = next(n for n in broken if "linear_qkv" in n)
    broken[name] = [0.0] * len(broken[name])
    with pytest.raises(AssertionError, match="linear_qkv"):
        compare([(losses, broken)], reference[False])


def unflushed() -> list[str]:
    from mt_megatron.errors import MtMegatronError
    from mt_megatron.seams import gemm
    from tests.patches import small_gpt

    messages = []
    for overlap in (False, True):
        small_gpt.start()
        config = small_gpt.transformer_config()
        model = small_gpt.distributed(config, small_gpt.build(config), overlap_grad_reduce=overlap)
        with gemm.deferred_wgrad() as queue:
            try:
                small_gpt.train_step(model, [small_gpt.batch()])
                messages.append("reduced")
            except (MtMegatronError, AssertionError) as error:
                messages.append(f"{type(error).__name__}: {error}")
        assert queue.discard() > 0
    return messages


def test_reducing_before_flushing_is_refused():
    ((at_the_end, overlapped),) = run_ranks(1, f"{HERE}:unflushed")
    assert "call flush()" in at_the_end
    # With overlap upstream itself notices that the bucket never became ready.
    assert "Communication call has not been issued" in overlapped


def frozen(options: dict[str, Any]) -> Any:
    """A column and a row linear with frozen weights: what reaches the input and the bias."""
    from tests.patches import small_gpt

    small_gpt.start(tp=options["tp"])
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    sequence_parallel = options["sequence_parallel"]
    config = small_gpt.transformer_config(sequence_parallel=sequence_parallel)
    layer = ColumnParallelLinear(6, 8, config=config, init_method=torch.nn.init.zeros_, bias=True)
    generator = torch.Generator().manual_seed(0)
    weight, x, dy = (torch.randn(s, generator=generator) for s in ((8, 6), (4, 2, 6), (4, 2, 8)))
    rank, size = parallel_state.get_tensor_model_parallel_rank(), options["tp"]
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(size)[rank])
    layer.weight.requires_grad_(False)
    mine = (x.chunk(size)[rank] if sequence_parallel else x).clone().requires_grad_()
    output, _ = layer(mine)
    output.backward(dy.chunk(size, -1)[rank])
    gradient = mine.grad
    if sequence_parallel:
        gradient = tensor_parallel.gather_from_sequence_parallel_region(gradient)
    return {
        "gradient": float((gradient - dy @ weight).abs().max()),
        "bias": float((layer.bias.grad - dy.sum((0, 1)).chunk(size)[rank]).abs().max()),
        "weight": layer.weight.grad is None,
    }


def all_frozen() -> Any:
    return [frozen({"tp": 2, "sequence_parallel": parallel}) for parallel in (False, True)]


def test_frozen_weight():
    for result in sum(run_ranks(2, f"{HERE}:all_frozen"), []):
        assert result["gradient"] < 1e-5 and result["bias"] < 1e-5 and result["weight"]


def put_off(cases: list[dict[str, Any]]) -> Any:
    """Pipeline of two with the output layer's weight gradients put off to the end, or not: losses, gradients,
    the output layer's gradient when its reduction begins, and whether it is part of a graph."""
    return [put_off_once(**case) for case in cases]


def put_off_once(
    limit: int | None = None,
    *,
    overlap: bool = False,
    aligned: bool = False,
    schedule: str | None = None,
    before: str | None = None,
) -> Any:
    from tests.patches import small_gpt
    from tests.pipeline.execute.ranks import use

    small_gpt.start(pp=2)
    config = small_gpt.transformer_config(
        gradient_accumulation_fusion=True,
        defer_embedding_wgrad_compute=limit is not None,
        wgrad_deferral_limit=limit or 0,
    )
    model = small_gpt.distributed(
        config, small_gpt.build(config), overlap_grad_reduce=overlap, check_for_nan_in_grad=True
    )
    if aligned:
        config.grad_sync_func = model.start_grad_sync
    weight = model.module.output_layer.weight if model.module.post_process else None
    reduced = []
    for group in model.bucket_groups if weight is not None else ():
        # Upstream calls this right before it reduces.
        group.check_for_nan_in_grad = lambda: reduced.append(weight.main_grad.detach().flatten().tolist())
    use(schedule, 2)
    try:
        if before is not None:
            step_before(before, config, model)
        losses = small_gpt.train_step(model, [small_gpt.batch(seed) for seed in range(4)])
    finally:
        use(None, 2)
    graph = weight is not None and weight.main_grad.requires_grad
    return losses, small_gpt.whole_gradients(model.module), reduced, graph


def step_before(kind: str, config: Any, model: Any) -> None:
    """A step that leaves no gradients: an evaluation, or one that is not finished, as a search for a NaN."""
    from mt_megatron.seams.schedule import run_schedule
    from tests.patches import small_gpt

    finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    if kind == "unfinished":
        small_gpt.train_step(model, [small_gpt.batch(seed) for seed in range(4, 8)])
        model.zero_grad_buffer()
    else:
        with torch.no_grad():
            run_schedule(
                small_gpt.forward_step,
                [model],
                iter([small_gpt.batch(seed) for seed in range(3)]),
                num_microbatches=3,
                seq_length=small_gpt.SEQUENCE,
                micro_batch_size=small_gpt.BATCH,
                forward_only=True,
            )
        assert not getattr(model.module, "embedding_activation_buffer", None)
    config.finalize_model_grads_func = finalize


PUT_OFF: list[dict[str, Any]] = [
    {},
    {"limit": 0},
    {"limit": 2},
    {"limit": 0, "overlap": True},
    {"limit": 2, "overlap": True, "aligned": True},
    {"limit": 0, "overlap": True, "schedule": "zb_h1"},
    {"limit": 0, "overlap": True, "aligned": True, "schedule": "breadth_first"},
    {"limit": 0, "before": "unfinished"},
    {"limit": 2, "before": "unfinished", "schedule": "zb_h1"},
    {"limit": 0, "before": "evaluation"},
]


@pytest.fixture(scope="module")
def found_put_off() -> Any:
    return run_ranks(2, f"{HERE}:put_off", PUT_OFF)


def test_output_layer_gradients_put_off_by_the_schedule(found_put_off: Any) -> None:
    for expected, *others in found_put_off:
        for losses, gradients, _, graph in others:
            assert losses == expected[0] and not graph
            for name, gradient in expected[1].items():
                assert gradients[name] == pytest.approx(gradient, rel=1e-5, abs=1e-7), name


def test_gradients_put_off_are_there_when_they_are_reduced(found_put_off: Any) -> None:
    for case, (_, gradients, reduced, _) in zip(PUT_OFF, found_put_off[1], strict=True):
        assert reduced == [gradients["output_layer.weight"]], case


def strided_sum(features: list[str] | None) -> Any:
    from tests.patches import small_gpt

    small_gpt.start(tp=2, features=features)
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    return reduce_from_tensor_model_parallel_region(torch.arange(4.0).view(2, 2).t()).tolist()


def test_tensor_that_is_not_contiguous_is_summed_too():
    for features, expected in (
        (None, [[0.0, 4.0], [2.0, 6.0]]),
        # Upstream alone sums a copy. Should that change one day, the patch can go.
        (["device", "collectives", "compat", "linear"], [[0.0, 2.0], [1.0, 3.0]]),
    ):
        assert run_ranks(2, f"{HERE}:strided_sum", features) == [expected] * 2

"""Work of the ranks of the executor's tests; each function returns JSON-able results."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch

from tests.pipeline.execute import small_models

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def use(name: str | None, pp: int, chunks: int = 1, microbatches: int = 4) -> None:
    """Run steps by the schedule called ``name``, None: by upstream's."""
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule

    if name is None:
        set_pipeline_schedule(None)
        return
    from mt_megatron.pipeline.choice import parse

    set_pipeline_schedule(parse(name).schedule(pp, chunks, microbatches))


def same_as_upstream(pp: int, cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Per case and schedule what differs from upstream's schedule, by name of the gradient or statistic."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.update(_case(**{"pp": pp, **case}))
    return found


def _case(
    *,
    pp: int,
    model: str,
    schedules: list[str],
    chunks: int = 1,
    microbatches: int = 4,
    tp: int = 1,
    cp: int = 1,
    **options: Any,
) -> dict[str, list[str]]:
    small_models.start(pp, vpp=chunks if chunks > 1 else None, tp=tp, cp=cp)
    pipeline = small_models.Pipeline(model, layers=pp * chunks, **options)
    use(None, pp)
    expected = pipeline.digests(pipeline.step(microbatches))
    found = {}
    for name in schedules:
        use(name, pp, chunks, microbatches)
        got = pipeline.digests(pipeline.step(microbatches))
        label = f"P{pp} T{tp} C{cp} {model} {name} x{chunks} m{microbatches} {options or ''}".strip()
        assert got.keys() == expected.keys() and len(got) > 5
        found[label] = [key for key in expected if got[key] != expected[key]]
    use(None, pp)
    return found


def same_with_dropout(pp: int, cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """What differs between a case's schedules in two steps with dropout, one after the other; beside it what
    differs from a run with another seed, which must be nearly everything."""
    found: dict[str, list[str]] = {}
    for case in cases:
        options = {**DROPOUT, **case}
        model, schedules, chunks = options.pop("model"), options.pop("schedules"), options.pop("chunks", 1)
        microbatches, v = options.pop("microbatches", 4), options.pop("v", False)
        like = options.pop("like", None)
        small_models.start(pp, vpp=chunks if chunks > 1 else None, v=v)
        pipeline = small_models.Pipeline(model, layers=pp * chunks, **options)
        two = partial(_steps, pipeline, pp, chunks, microbatches)
        first, last = schedules[0], schedules[-1]
        expected, label = two([first, first]), f"{model} x{chunks}"
        for name in schedules[1:]:
            found[f"{label} {first} {name}"] = _differences(expected, two([name, name]))
        found[f"{label} switched"] = _differences(expected, two([last, first]))
        if like is not None:
            plain = small_models.Pipeline(like, layers=pp * chunks, **DROPOUT)
            other = _steps(plain, pp, chunks, microbatches, [first, first])
            found[f"{label} {like}"] = _differences(expected, other)
        found[f"{label} other seed"] = _differences(expected, two([first, first], seed=8))
    use(None, pp)
    return found


def _steps(
    pipeline: Any, pp: int, chunks: int, microbatches: int, names: list[str], seed: int = 7
) -> list[dict[str, Any]]:
    """Digests of one step after the other, each by another schedule, from the same random states on."""
    small_models.seed_all(seed)
    digests = []
    for name in names:
        use(name, pp, chunks, microbatches)
        digests.append({**pipeline.digests(pipeline.step(microbatches)), "random": random_states()})
    return digests


def _differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    assert all(a.keys() == b.keys() for a, b in zip(one, other, strict=True))
    return sorted({key for a, b in zip(one, other, strict=True) for key in a if a[key] != b[key]})


def random_states() -> str:
    """All random states of the device, as one digest."""
    from megatron.core import tensor_parallel

    import mt_megatron

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    every = [mt_megatron.backend().get_rng_state(), *(states[name] for name in sorted(states))]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in every)).hexdigest()[:16]


def placements(pp: int, models: list[str], microbatches: int) -> dict[str, Any]:
    """Per model: what differs between ZBV and DualPipeV, and the largest relative error of their losses and
    gradients against upstream's interleaved schedule of the same weights."""
    found = {}
    for model in models:
        by_name: dict[str, Any] = {}
        for name in ("upstream", "zbv", "dualpipev", "breadth_first"):
            small_models.start(pp, vpp=2, v=name in ("zbv", "dualpipev"))
            pipeline = small_models.Pipeline(model, layers=2 * pp)
            use(None if name == "upstream" else name, pp, 2, microbatches)
            reports = pipeline.step(microbatches)
            by_name[name] = (pipeline.digests(reports), everything(pipeline, reports))
        zbv, dual = by_name["zbv"], by_name["dualpipev"]
        found[model] = {
            "differ": [key for key in zbv[0] if zbv[0][key] != dual[0][key]],
            "error": _errors(zbv[1], by_name["upstream"][1]),
            "loop": _errors(by_name["breadth_first"][1], by_name["upstream"][1]),
            "parameters": len(zbv[1]),
        }
    use(None, pp)
    return found


def everything(pipeline: Any, reports: list[Any]) -> dict[str, torch.Tensor]:
    """Gradients of the whole model by name, and the losses, the same on every rank."""
    import torch.distributed as dist

    own = {name: parameter.main_grad.double() for name, parameter in pipeline.whole_names().items()}
    if reports:
        own["losses"] = torch.tensor([report["loss"] for report in reports], dtype=torch.float64)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found: dict[str, torch.Tensor] = {}
    for part in every:
        for name, gradient in part.items():
            name = name.rstrip("@")
            # A shared weight's gradient is the same wherever it is held.
            assert name not in found or torch.equal(found[name], gradient), name
            found[name] = gradient
    return found


def _errors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[k] - other[k]).norm() / other[k].norm().clamp(min=1e-12)) for k in one)

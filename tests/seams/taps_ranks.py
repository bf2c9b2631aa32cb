"""The ranks of ``test_taps_ranks.py``: small models, watched and not."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from tests.pipeline.execute import small_models
from tests.pipeline.execute.ranks import random_states, use


class Seen:
    """Everything that taps on all modules and the loss tell, by whole path."""

    def __init__(self, chunks: Any) -> None:
        from mt_megatron.seams import taps

        self.values: dict[str, Tensor] = {}
        self.told = Counter[str]()
        self.order: list[tuple[str, int, int]] = []
        self._open = ExitStack()
        for path, module in taps.named_modules(chunks):
            if path == "":
                continue
            self._open.enter_context(
                taps.watch(
                    module,
                    before=lambda call, args, kwargs, path=path: self._take(
                        "input", path, call, (args, kwargs)
                    ),
                    after=lambda call, output, path=path: self._take("output", path, call, output),
                    output_gradient=lambda call, gradient, index, path=path: self._take(
                        f"output gradient {index}", path, call, gradient
                    ),
                    input_gradient=lambda call, gradient, index, path=path: self._take(
                        f"input gradient {index}", path, call, gradient
                    ),
                )
            )
        self._open.enter_context(taps.loss_blocks(lambda block: self._block(block)))

    def _take(self, what: str, path: str, call: Any, values: Any) -> None:
        from mt_megatron.seams import taps

        assert not torch.is_grad_enabled()
        direction = "backward" if "gradient" in what else "forward"
        # In backward the schedule's number is that of the call whose gradient it is.
        assert (call.microbatch, call.chunk) == (taps.current_microbatch(), taps.current_chunk())
        key = f"{what} {path} {call.microbatch} {call.ordinal}"
        # Every chunk has some modules for itself, whose paths are the same.
        self.told[f"{key} of chunk {call.chunk}"] += 1
        self.order.append((direction, call.chunk, call.microbatch))
        for index, tensor in enumerate(taps.modules.tensors(values)):
            assert not tensor.requires_grad
            self.values[f"{key} {index}"] = tensor.clone()

    def _block(self, block: Any) -> None:
        for name in ("logits", "lse", "losses", "labels"):
            key = f"loss {name} {block.microbatch} {block.depth}"
            known = self.values.get(key)
            value = getattr(block, name).clone()
            self.values[key] = value if known is None else torch.cat((known, value))

    def close(self) -> None:
        self._open.close()


def left_over(pipeline: Any) -> list[str]:
    """What taps have left on modules."""
    return [
        f"{type(module).__name__}: {name}"
        for chunk in pipeline.chunks
        for module in chunk.modules()
        for name in ("forward", "routing")
        if name in vars(module)
    ] + [
        f"{type(module).__name__}: hooks"
        for chunk in pipeline.bare
        for module in chunk.modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]


def same_bits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: what differs between a step that is watched in everything and one that is not."""
    found = []
    for case in cases:
        options = dict(case)
        sizes = {name: options.pop(name, 1) for name in ("tp", "cp", "ep")}
        pp, chunks = options.pop("pp", 1), options.pop("chunks", 1)
        model, schedule = options.pop("model", "dense"), options.pop("schedule", None)
        small_models.start(pp, vpp=chunks if chunks > 1 else None, **sizes)
        pipeline = small_models.Pipeline(model, layers=max(2, pp * chunks), **options)
        use(schedule, pp, chunks, 4)

        def step(pipeline: Any = pipeline) -> dict[str, Any]:
            small_models.seed_all(7)
            digests = pipeline.digests(pipeline.step(4))
            return {**digests, "random": random_states()}

        plain = step()
        seen = Seen(pipeline.chunks)
        watched = step()
        seen.close()
        again = step()
        use(None, pp)
        assert plain.keys() == watched.keys() and len(plain) > 5
        found.append(
            {
                "differ": [name for name in plain if not plain[name] == watched[name] == again[name]],
                "left": left_over(pipeline),
                "more than once": [key for key, times in seen.told.items() if times > 1],
                "microbatches": sorted({key[1:] for key in seen.order}),
                "gradients": sum(key.startswith("output gradient") for key in seen.told),
                "outputs": sum(key.startswith("output decoder") for key in seen.told),
                "paths": sorted({key.split()[1] for key in seen.told if key.startswith("output decoder.la")}),
                "blocks": sum(key.startswith("loss lse") for key in seen.values),
            }
        )
    return found


def plain_hooks(recompute: bool, model: str = "dense") -> dict[str, Any]:
    """Values by taps on a model, recomputed or not, and by torch's own hooks on one that is not."""
    small_models.start(1)
    pipeline = small_models.Pipeline(model, layers=2, cross_entropy_loss_fusion=True)
    oracle: dict[str, Tensor] = {}
    counts = Counter[str]()
    handles = []

    def hook(path: str) -> Any:
        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            from mt_megatron.seams import taps

            number = counts[path]
            counts[path] += 1
            for index, tensor in enumerate(taps.modules.tensors(output)):
                oracle[f"output {path} {number} {index}"] = tensor.detach().clone()
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda gradient, index=index: oracle.__setitem__(
                            f"gradient {path} {number} {index}", gradient.clone()
                        )
                    )

        return after

    for path, module in pipeline.bare[0].named_modules():
        # On the output layer it would switch the blocked loss off.
        if path not in ("", "output_layer"):
            handles.append(module.register_forward_hook(hook(path), with_kwargs=True))
    pipeline.step(2)
    for each in handles:
        each.remove()
    more = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    watched = small_models.Pipeline(
        model, layers=2, cross_entropy_loss_fusion=True, **(more if recompute else {})
    )
    seen = Seen(watched.chunks)
    watched.step(2)
    seen.close()
    differ, compared = [], 0
    calls = {path: count // 2 for path, count in counts.items()}
    for key, value in seen.values.items():
        what, *rest = key.split()
        if what == "output" and rest[0] != "gradient":
            path, microbatch, ordinal, index = rest
            expected = oracle.get(f"output {path} {int(microbatch) * calls[path] + int(ordinal)} {index}")
        elif what == "output":
            _, index, path, microbatch, ordinal, _ = rest
            expected = oracle.get(f"gradient {path} {int(microbatch) * calls[path] + int(ordinal)} {index}")
        else:
            continue
        compared += 1
        if expected is None or not torch.equal(value, expected):
            differ.append(key)
    paths = {key.split()[1] for key in oracle}
    watched_paths = {key.split()[3] for key in seen.values if key.startswith("output gradient")}
    gradients = {key.split()[1] for key in oracle if key.startswith("gradient")}
    return {
        "differ": differ,
        "compared": compared,
        "unseen": sorted(gradients - watched_paths),
        "blocked": not any(key.startswith("output output_layer") for key in seen.values),
        "paths": len(paths),
    }


def loss_of(tp: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case: largest errors of what the loss gives against dense logits in float64."""
    small_models.start(1, tp=tp)
    found = []
    for case in cases:
        options = dict(case)
        asked = {name: range(*options.pop(name)) for name in ("positions", "samples") if name in options}
        model, bf16 = options.pop("model", "dense"), options.get("bf16", False)
        pipeline = small_models.Pipeline(model, layers=2, **options)
        layer = pipeline.bare[0].output_layer
        blocks, hidden = _loss_seen(pipeline, layer, asked)
        weight = layer.weight
        whole = torch.cat(_gathered(weight.detach().double().contiguous())) if tp > 1 else weight.double()
        errors = Counter[str]()
        tokens = 0
        for microbatch, depth, states in hidden:
            if tp > 1 and pipeline.config.sequence_parallel:
                states = torch.cat(_gathered(states))
            dense = states.double() @ whole.t()
            mine = [each for each in blocks if (each.microbatch, each.depth) == (microbatch, depth)]
            for block in mine:
                tokens += len(block.positions)
                logits = dense[block.positions, block.samples]
                part = logits[:, block.first : block.first + block.logits.shape[1]]
                logprobs = logits.log_softmax(-1)
                truth = {
                    "logits": (part, block.logits),
                    "lse": (logits.logsumexp(-1), block.lse),
                    "losses": (-logprobs.gather(1, block.labels[:, None]).squeeze(1), block.losses),
                    "entropy": (-(logprobs.exp() * logprobs).sum(-1), _summed(block.entropy_part(), tp)),
                }
                for name, (expected, value) in truth.items():
                    error = float((expected - value.double()).abs().max() / expected.abs().max())
                    errors[name] = max(errors[name], error)
                ids, values = block.top(4)
                wrong = (logprobs.gather(1, ids) - values.double()).abs().max()
                errors["top"] = max(errors["top"], float(wrong))
        found.append(
            {
                "errors": {name: error for name, error in errors.items() if error > (5e-2 if bf16 else 1e-5)},
                "measured": sorted(errors),
                "tokens": tokens,
                "blocks": len(blocks),
                "positions": sorted({int(each) for block in blocks for each in block.positions}),
                "samples": sorted({int(each) for block in blocks for each in block.samples}),
                "words": sorted({(block.first, block.logits.shape[1], block.vocab_size) for block in blocks}),
            }
        )
    return found


def _loss_seen(
    pipeline: Any, layer: Any, asked: dict[str, Any]
) -> tuple[list[Any], list[tuple[int, int, Tensor]]]:
    """The blocks of a step, and what went into the output layer: micro-batch, depth, states."""
    from mt_megatron.seams import taps

    blocks: list[Any] = []
    hidden: list[tuple[int, int, Tensor]] = []

    def before(call: Any, args: Any, kwargs: Any) -> None:
        hidden.append((call.microbatch, call.ordinal, args[0].clone()))

    with taps.loss_blocks(blocks.append, **asked), taps.watch(layer, before=before):
        pipeline.step(2)
    return blocks, hidden


def _gathered(own: Tensor) -> list[Tensor]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own.contiguous(), group=group)
    return every


def _summed(own: Tensor, tp: int) -> Tensor:
    return own if tp == 1 else torch.stack(_gathered(own)).sum(0)


def recomputed_modules() -> dict[str, Any]:
    """Reports of a core attention that alone is recomputed, and of a callback that raises."""
    from mt_megatron.seams import taps

    small_models.start(1)
    pipeline = small_models.Pipeline("dense", layers=2, recompute_granularity="selective")
    expected = pipeline.digests(pipeline.step(2))
    counts = Counter[str]()
    told: list[str] = []
    core = pipeline.bare[0].decoder.layers[0].self_attention.core_attention
    mlp = pipeline.bare[0].decoder.layers[1].mlp

    def fail(call: Any, output: Any) -> None:
        counts["failing"] += 1
        raise ValueError("no good")

    watches = [
        taps.watch(
            core,
            after=lambda call, output: counts.update(["forward"]),
            output_gradient=lambda call, gradient, index: counts.update(["gradient"]),
            input_gradient=lambda call, gradient, index: counts.update([f"input {index}"]),
        ),
        taps.watch(core, recomputed=True, after=lambda call, _: counts.update([f"all {call.recomputing}"])),
        taps.watch(mlp, after=fail, told=told.append),
    ]
    got = pipeline.digests(pipeline.step(2))
    states = [watches[-1].closed, "forward" in vars(mlp)]
    for each in watches:
        each.close()
    return {
        "counts": counts,
        "told": told,
        "states": states,
        "same": got == expected,
        "left": left_over(pipeline),
    }

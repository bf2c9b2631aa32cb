"""The ranks' side of the tests of uses that no training run of ours makes."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.fp8.activation import Activation
from mt_megatron.fp8.checkpoint import sharded_state
from mt_megatron.fp8.quantise import quantise
from mt_megatron.fp8.state import Fp8State, states_of
from mt_megatron.models.families import family_of
from mt_megatron.seams.gemm import deferred_wgrad
from mt_megatron.training.distributed import joined
from tests.fp8.cases import Run, begin, config_of

DELAYED = "--fp8-recipe delayed --fp8-amax-history-len 4"


def observed() -> dict[str, Any]:
    begin()
    config = config_of(DELAYED)
    found: dict[str, Any] = {}
    with joined(config, mt_megatron.backend()) as job:
        run = Run(DELAYED, job)
        model = run.trainable.bare_chunks()[0]
        linear = model.decoder.layers[1].mlp.linear_fc1
        x = torch.randn(16, 1, 64, dtype=torch.bfloat16)
        gradients = []
        for plain in (False, True):
            inputs = x.clone().requires_grad_()
            output = torch.nn.functional.linear(inputs, linear.weight) if plain else linear(inputs)[0]
            output.backward(1e-6 * torch.ones_like(output))
            gradients.append(inputs.grad.float().norm())
        found["tiny gradient"] = float(gradients[0] / gradients[1])
        x[0, 0, 0] = float("inf")
        found["infinite input is seen"] = not bool(torch.isfinite(linear(x)[0]).all())
        inputs = torch.randn(16, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        output, _ = linear(inputs)
        wrong = torch.ones_like(output)
        wrong[0, 0, 0] = float("inf")
        output.backward(wrong)
        found["infinite gradient is seen"] = not bool(torch.isfinite(inputs.grad).all())
        core = run.trainable.core
        formats = dataclasses.replace(core, fp8_recipe="tensorwise", fp8="e4m3", fp8_amax_history_len=1)
        again = dataclasses.replace(formats)
        found["format"] = [formats.fp8_recipe_format, again.fp8_recipe_format]
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from mt_megatron.models.layer_spec import gpt_layer_spec

        def built(core: Any = core) -> Any:
            spec = gpt_layer_spec(config, core)
            return GPTModel(core, spec, 128, 32, position_embedding_type="rope")

        second = built()
        states = [*run.states, *states_of([second])]
        found["linears of each"] = [len(state.linears) for state in states]
        run.step()
        found["steps of each"] = [state.step for state in states]
        kept = sharded_state([model])
        found["kept"] = all(torch.equal(kept[name].data, states[0].row(name)) for name in states[0].linears)
        # The last projection stays in bf16, and holds the state of its own model's output layer.
        mostly = dataclasses.replace(core, fp8_output_layer=True, first_last_layers_bf16=True)
        pair = [built(mostly), built(mostly)]
        pair[1].output_layer.weight.gemm_recipe.demoted = True
        extra = [each.decoder.layers[-1].self_attention.linear_proj.get_extra_state() for each in pair]
        found["demoted output layers"] = [each["rows"]["output_layer"][0].item() for each in extra]
        one_by_one = dataclasses.replace(core)
        layers = []
        for number in (1, 2):
            layer = TransformerLayer(one_by_one, get_gpt_layer_local_spec().submodules, layer_number=number)
            layers.append(layer.bfloat16())
            layer.mlp.linear_fc1(torch.randn(16, 1, 64, dtype=torch.bfloat16))
        found["states of layers"] = [
            len(states_of([each])) for each in (*layers, torch.nn.ModuleList(layers))
        ]
        buffer = io.BytesIO()
        torch.save(linear.weight, buffer)
        buffer.seek(0)
        stored = torch.load(buffer, weights_only=False)
        found["stored"] = torch.equal(stored, linear.weight)
        found["recipe of the stored"] = getattr(stored, "gemm_recipe", None)
    return found


def gathered_operands(recipes: list[str]) -> dict[str, dict[str, Any]]:
    """Operands that sequence-parallel ranks put together from codes, beside the cast of all their rows."""
    begin()
    from megatron.core import parallel_state

    found: dict[str, dict[str, Any]] = {}
    gathered = Activation.gathered
    for name in recipes:
        flags = f"--fp8-recipe {name} --tensor-model-parallel-size 2 --sequence-parallel"
        flags += " --fp8-amax-history-len 4" if name == "delayed" else ""
        with joined(config_of(flags), mt_megatron.backend()) as job:
            run = Run(flags, job)
            [state] = run.states
            group = parallel_state.get_tensor_model_parallel_group()
            counts, digest = Counter[str](), hashlib.sha256()

            def watched(
                self: Activation,
                role: Any,
                parts: Any,
                state: Fp8State = state,
                group: Any = group,
                counts: Counter[str] = counts,
                digest: Any = digest,
            ) -> Activation:
                made = gathered(self, role, parts)
                whole = made.quantised(role)
                digest.update(
                    whole.inverse.numpy().tobytes() + whole.codes.view(torch.uint8).numpy().tobytes()
                )
                if self.source is None:
                    counts["from codes"] += 1
                    return made
                rows = [torch.empty_like(self.source) for _ in range(group.size())]
                dist.all_gather(rows, self.source, group=group)
                scale = None
                if state.recipe.scaling == "delayed":
                    history, scales, _ = state._tensors(torch.device("cpu"))
                    slot = state._slots[self._owner.name, self._kind]
                    scale = scales[slot] if history[slot].any() else None
                expected = quantise(torch.cat(rows), whole.cast, whole.along, scale=scale)
                same = torch.equal(expected.codes.view(torch.uint8), whole.codes.view(torch.uint8))
                same = same and torch.equal(expected.inverse, whole.inverse)
                if whole.second is not None:
                    assert expected.second is not None
                    same = same and torch.equal(expected.second, whole.second)
                counts[f"step {state.step}: {'the same' if same else 'different'}"] += 1
                return made

            Activation.gathered = watched  # type: ignore[method-assign,assignment]
            try:
                for _ in range(2):
                    run.step()
            finally:
                Activation.gathered = gathered  # type: ignore[method-assign]
            found[name] = {**counts, "digest": digest.hexdigest()}
    return found


def copied(recipes: list[str]) -> dict[str, dict[str, Any]]:
    """Copies of a model, of one layer and of one linear beside what they were copied from."""
    begin()
    found: dict[str, dict[str, Any]] = {}
    for name in recipes:
        flags = f"--fp8-recipe {name} --fp8-output-layer"
        flags += " --fp8-amax-history-len 4" if name == "delayed" else ""
        config = config_of(flags)
        with joined(config, mt_megatron.backend()) as job:
            # Training connects a model's configuration with wrappers that nobody can copy.
            [model] = family_of(config).build_model(config, job.layout)
            model.bfloat16()
            [before] = states_of([model])
            with before.stepping(forward_only=False):
                _first(model)(torch.randn(8, 2, 64, dtype=torch.bfloat16))
            twin = copy.deepcopy(model)
            [after] = states_of([twin])
            layer, linear = (copy.deepcopy(each) for each in (model.decoder.layers[1], _first(model)))
            x = torch.randn(8, 2, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(6))
            sides = (_first(model), _first(twin), layer.mlp.linear_fc1, linear)
            outputs = [side(x)[0] for side in sides]
            plain = torch.nn.functional.linear(x, linear.weight)
            rows = {each: before.row(each) for each in before.linears}
            for each in after.linears:
                after.demote(each)
            found[name] = {
                "same": [bool(torch.equal(outputs[0], each)) for each in outputs[1:]],
                "is FP8": not torch.equal(outputs[0], plain),
                "apart": before is not after and not set(before.every()) & set(after.every()),
                "linears": [len(before.linears), len(after.linears), len(states_of([linear])[0].linears)],
                "step": [before.step, after.step],
                "state": bool(all(torch.equal(after.row(each)[1:], row[1:]) for each, row in rows.items())),
                "untouched": not any(before.is_demoted(each) for each in before.linears),
                "of the copy": all(
                    each.parameter is parameter
                    for each, parameter in (
                        (twin.output_layer.weight.gemm_recipe, twin.output_layer.weight),
                        (_first(twin).weight.gemm_recipe, _first(twin).weight),
                    )
                ),
            }
            buffer = io.BytesIO()
            torch.save(_first(model).fp8_attached, buffer)
            buffer.seek(0)
            found[name]["stored"] = torch.load(buffer, weights_only=False)
            configuration = copy.deepcopy(model.config)
            found[name]["of a configuration alone"] = [each for each in configuration.fp8_states if each]
    return found


def _first(model: Any) -> Any:
    return model.decoder.layers[1].mlp.linear_fc1


def deferred(recipes: list[str], fused: bool) -> dict[str, bool]:
    """True where weight gradients of two micro-batches that waited equal those that did not, flushed within
    their step of the state and after the next one has begun."""
    begin()
    found = {}
    for name in recipes:
        flags = f"--fp8-recipe {name}" + ("" if fused else " --no-gradient-accumulation-fusion")
        with joined(config_of(flags), mt_megatron.backend()) as job:
            run = Run(flags, job)
            linear = run.trainable.bare_chunks()[0].decoder.layers[1].mlp.linear_fc1
            generator = torch.Generator().manual_seed(2)
            x = torch.randn(2, 24, 2, 64, dtype=torch.bfloat16, generator=generator)
            back = torch.randn(24, 2, linear.weight.shape[0], dtype=torch.bfloat16, generator=generator)
            [state], gradients = run.states, []
            restore = state.snapshot()
            for waits in ("not", "within", "beyond"):
                linear.weight.main_grad.zero_()
                linear.weight.grad = None
                restore()
                with state.stepping(forward_only=False):
                    with deferred_wgrad() if waits != "not" else nullcontext() as queue:
                        for part in x:
                            inputs = part.clone().requires_grad_()
                            output, _ = linear(inputs)
                            output.backward(back)
                    if waits == "within":
                        assert queue is not None and queue.flush() == 2
                if waits == "beyond":
                    with state.stepping(forward_only=False):
                        linear(x[0])
                        assert queue is not None and queue.flush() == 2
                grad = linear.weight.main_grad if fused else linear.weight.grad
                # The hook of DDP moves what is not fused.
                gradients.append((linear.weight.main_grad if grad is None else grad).clone())
            same = all(torch.equal(gradients[0], each) for each in gradients[1:])
            found[name] = same and bool(gradients[0].any())
    return found


def gathered_growth() -> dict[str, Any]:
    flags = (
        "--fp8-recipe delayed --fp8-amax-history-len 4 --use-distributed-optimizer --fp8-param-gather "
        "--lr 0.05 --min-lr 0.05 --lr-warmup-iters 0 --lr-decay-style constant"
    )
    begin()
    config = config_of(flags)
    with joined(config, mt_megatron.backend()) as job:
        run = Run(flags, job)
        for _ in range(8):
            run.step()
        weight = run.trainable.bare_chunks()[0].decoder.layers[1].mlp.linear_fc1.weight
        part = None
        for optimizer in getattr(run.trainable.optimizer, "chained_optimizers", [run.trainable.optimizer]):
            if weight in optimizer.model_param_gbuf_map:
                groups = optimizer.model_param_group_index_map[weight]
                part = optimizer.optimizer.param_groups[groups[0]]["params"][groups[1]]
        wanted = torch.zeros(()) if part is None else part.detach().abs().max().float()
        torch.distributed.all_reduce(wanted, op=torch.distributed.ReduceOp.MAX)
        return {"amax": float(weight.detach().abs().max()), "wanted": float(wanted)}

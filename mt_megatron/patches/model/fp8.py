"""FP8 linears: transformer layers get their recipe when they are built, schedules mark steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def _layer_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if getattr(self.config, "fp8_recipe", None) is not None:
        from mt_megatron.fp8.attach import attach

        attach(self)


def _model_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if getattr(self.config, "fp8_output_layer", False):
        from mt_megatron.fp8.attach import attach_output_layer

        attach_output_layer(self)


def _get_extra_state(original: Callable[..., Any], self: Any) -> Any:
    from mt_megatron.fp8.extra_state import extra_state

    found = extra_state(self)
    return original(self) if found is None else found


def _set_extra_state(original: Callable[..., None], self: Any, state: Any) -> None:
    original(self, state)
    from mt_megatron.fp8.extra_state import load_extra_state

    load_extra_state(self, state)


def in_fp8_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """While it runs weights do not change; when it ends, magnitudes of the step are known."""
    from mt_megatron.fp8.state import states_of

    model = kwargs["model"]
    states = states_of(model if isinstance(model, list) else [model])
    if not states:
        return original(*args, **kwargs)
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(state.stepping(forward_only=bool(kwargs.get("forward_only"))))
        return original(*args, **kwargs)


def _start_param_sync(original: Callable[..., None], self: Any, force_sync: bool = False) -> None:
    if not self.ddp_config.fp8_param_gather or (force_sync and self.param_gather_handle is not None):
        original(self, force_sync)
        return
    from mt_megatron.fp8.param_gather import Done, gather, has_fp8

    if not has_fp8(self):
        original(self, force_sync)
        return
    gather(self)
    overlaps = self.ddp_config.overlap_param_gather and not force_sync
    self.param_gather_handle = Done() if overlaps else None
    self.param_gather_dispatched = True


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="fp8.layer",
            target="megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
            kind="wrap",
            feature="fp8",
            reason="with fp8_recipe its linears compute in FP8, without Transformer Engine",
            body=_layer_init,
            digest="137a75e6dbb4dca25b3f80e4132179309e6e7942773ce0f7d60175bb0cb66a78",
            after=("model_config.fields",),
        ),
        Patch(
            id="fp8.model",
            target="megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            kind="wrap",
            feature="fp8",
            reason="with fp8_output_layer its output layer computes in FP8 too",
            body=_model_init,
            digest="5e0d533836dbda291a928289a0fc1b9afb9fc6b44c0d8bdb899e29c45a728fa0",
            after=("model_config.fields",),
        ),
        Patch(
            id="fp8.state_saved",
            target="megatron.core.tensor_parallel.layers:RowParallelLinear.get_extra_state",
            kind="wrap",
            feature="fp8",
            reason="attention's projection keeps the FP8 state of its layer in checkpoints of scripts",
            body=_get_extra_state,
            digest="443f3259bb7fa1c238cd18b57e537337102e8de607e5911e82dc2a98b0aa81c7",
        ),
        Patch(
            id="fp8.state_loaded",
            target="megatron.core.tensor_parallel.layers:RowParallelLinear.set_extra_state",
            kind="wrap",
            feature="fp8",
            reason="what was kept is put back",
            body=_set_extra_state,
            digest="8ce22bce4e34e9145c2a787d8a6f70074b158a3d64aa06d51a370cacf803a21e",
        ),
        Patch(
            id="fp8.param_gather",
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
            kind="wrap",
            feature="fp8",
            reason="with fp8_param_gather the weights that compute in FP8 are gathered as codes",
            body=_start_param_sync,
            digest="8bfb80aeb94b87021efa7908436c2e4de95490132cdb45df68868de4585a1a28",
        ),
        *(
            Patch(
                id=f"fp8.{name}",
                target=f"{_SCHEDULES}:{function}",
                kind="wrap",
                feature="fp8",
                reason="weights are cast once in a step, and scales follow the step's magnitudes",
                body=in_fp8_step,
                digest=digest,
            )
            for name, function, digest in (
                (
                    "no_pipelining",
                    "forward_backward_no_pipelining",
                    "e74558c938accecc8d6ad4a8f01c9475ee03a9345bdae28a28a204500b9724d5",
                ),
                (
                    "pipelining",
                    "forward_backward_pipelining_without_interleaving",
                    "11b5c443c66d6648fed87472e7d41773f41757fa9f10aff4a2d2b1db4a6cb574",
                ),
                (
                    "interleaving",
                    "forward_backward_pipelining_with_interleaving",
                    "9edfd1d009bdbb5492b67882a3bbf0fcdfa353a56ab42abfec237390e633c7b4",
                ),
            )
        ),
    ]

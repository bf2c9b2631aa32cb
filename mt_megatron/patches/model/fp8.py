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


def _schedule(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        *(
            Patch(
                id=f"fp8.{name}",
                target=f"{_SCHEDULES}:{function}",
                kind="wrap",
                feature="fp8",
                reason="weights are cast once in a step, and scales follow the step's magnitudes",
                body=_schedule,
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

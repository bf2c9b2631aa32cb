"""Context parallelism without Transformer Engine, also for scripts that name upstream's own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch
from mt_megatron.seams import collectives

_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"

_REFUSED = {
    "packed_seq_params": (
        5,
        "packed sequences were given; expected None: the chunks that a rank holds are cut from one "
        "sequence, not from several. Keep documents apart with an attention mask",
    ),
    "inference_params": (
        3,
        "a key-value cache was given; expected None: each rank has only its own part of the sequence. "
        "Generate with context_parallel_size=1",
    ),
}
"""Argument of ``Attention.forward`` -> its position and what is said about it."""


def _init(original: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Make the instance one of ours before it has any state, as ``norm`` does; a spec other than
    the local one (BERT, T5, a script's own) names upstream's class."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if config.context_parallel_size == 1 or type(self) is not DotProductAttention:
        original(self, config, *args, **kwargs)
        return
    from mt_megatron.layers.attention.core import DotProductAttention as Ours

    object.__setattr__(self, "__class__", Ours)
    Ours.__init__(self, config, *args, **kwargs)


def _forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse what cannot be right before anything is computed: upstream's rotary embedding cuts the
    frequencies of a cache and of packed sequences as if they were one sequence."""
    from mt_megatron.errors import ConfigError
    from mt_megatron.layers.attention.core import DotProductAttention as Ours

    if self.config.context_parallel_size > 1 and isinstance(self.core_attention, Ours):
        for name, (position, what) in _REFUSED.items():
            if kwargs.get(name, args[position] if position < len(args) else None) is not None:
                raise ConfigError(f"context_parallel_size is {self.config.context_parallel_size} and {what}")
    return original(self, *args, **kwargs)


def _finalize(original: Callable[..., None], model: Any, num_tokens: Any = None) -> None:
    """Upstream counts the tokens of data-parallel ranks and forgets those of context-parallel ones,
    whose gradients it does add up."""
    if num_tokens is not None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        if parallel_state.get_context_parallel_world_size() > 1:
            # Only the last stage's number counts; there all context-parallel ranks have one.
            group = parallel_state.get_context_parallel_group()
            with collectives.announced("all_reduce", "cp", group, num_tokens):
                dist.all_reduce(num_tokens, group=group)
    original(model, num_tokens)


def patches(backend: Backend) -> list[Patch]:
    def wrap(name: str, target: str, body: Callable[..., Any], reason: str, digest: str) -> Patch:
        return Patch(
            id=f"context_parallel.{name}",
            target=target,
            kind="wrap",
            feature="attention",
            reason=reason,
            body=body,
            digest=digest,
        )

    return [
        wrap(
            "dot_product_attention",
            f"{_ATTENTION}.__init__",
            _init,
            "it refuses context parallelism, which 0.9.0 leaves to Transformer Engine",
            digest="73db4168e62e49e548f643e329422e3b84e3976ccf0930079398e88172c90d3a",
        ),
        wrap(
            "attention_forward",
            "megatron.core.transformer.attention:Attention.forward",
            _forward,
            "rotary positions of packed sequences and caches would be wrong without a word",
            digest="52ba92bd540a379102f00eb24c47b405b31c1c2bbc08464308b98a9cbe5b5a76",
        ),
        wrap(
            "finalize_model_grads",
            "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
            _finalize,
            "loss per token divides by the tokens of too few ranks",
            digest="4b038d177f92acbac333161eb0ace89b1438ae3264c4babe8783d97d5162a14b",
        ),
    ]

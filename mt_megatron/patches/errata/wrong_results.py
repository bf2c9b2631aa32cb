"""Defects of Megatron-Core 0.9.0 that give wrong numbers without a message. Each names upstream's issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

_RANDOM = "megatron.core.tensor_parallel.random"
_MODEL_PARALLEL = "model-parallel-rng"
_OPEN = "_mt_megatron_open_forks"
"""Attribute of a tracker: the names of the streams that are forked now, the innermost last."""


def _block_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``with rng_context and fp8_context:`` enters the second alone, so the fork of the tracker is made here.

    Without it the ranks of a tensor-parallel group draw equal dropout masks for different tokens.
    """
    if not self.config.sequence_parallel:
        return original(self, *args, **kwargs)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return original(self, *args, **kwargs)


def _fork(
    original: Callable[..., AbstractContextManager[None]], self: Any, name: str = _MODEL_PARALLEL
) -> AbstractContextManager[None]:
    return _continued(original, self, name)


@contextmanager
def _continued(
    original: Callable[..., AbstractContextManager[None]], tracker: Any, name: str
) -> Iterator[None]:
    """A fork inside a fork of the same name goes on with its stream.

    Upstream starts again from the state of the outer fork's begin, and the outer fork's end overwrites
    what the inner one stored: every attention of a block would draw one mask, in every micro-batch.
    """
    open_forks = vars(tracker).setdefault(_OPEN, [])
    if not open_forks:
        with original(tracker, name), _entered(open_forks, name):
            yield
        return
    outer = open_forks[-1]
    if outer == name:
        yield
        return
    from megatron.core.tensor_parallel import random

    # The outer stream may be forked again inside this fork: it goes on from here, and from there afterwards.
    tracker.states_[outer] = random.torch.cuda.get_rng_state()
    try:
        with original(tracker, name), _entered(open_forks, name):
            yield
    finally:
        random._set_cuda_rng_state(tracker.states_[outer])


@contextmanager
def _entered(open_forks: list[str], name: str) -> Iterator[None]:
    open_forks.append(name)
    try:
        yield
    finally:
        open_forks.pop()


def _checkpoint_forward(
    original: Callable[..., Any], ctx: Any, run_function: Any, distribute_saved_activations: bool, *args: Any
) -> Any:
    """Recomputation has to fork as the forward pass did, though the fork around it is closed by then; and
    to compute in the types of autocast, whose region is left by then."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    ctx.open_forks = list(vars(get_cuda_rng_tracker()).get(_OPEN, ()))
    return original(ctx, _in_autocast_of_now(run_function, args), distribute_saved_activations, *args)


def _in_autocast_of_now(run: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """``run`` under the autocast of now, on or off, of every device that ``args`` lie on, whenever it is
    called."""
    import torch

    kinds = {each.device.type for each in args if isinstance(each, torch.Tensor)}

    def state() -> dict[str, tuple[bool, Any]]:
        return {
            # A meta tensor's device has no autocast, and torch no answer for it.
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        }

    then = state()

    def again(*args: Any) -> Any:
        now = state()
        with ExitStack() as regions:
            for kind, (enabled, dtype) in then.items():
                if now[kind] != (enabled, dtype) and (enabled or now[kind][0]):
                    regions.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            return run(*args)

    return again


def _checkpoint_backward(original: Callable[..., Any], ctx: Any, *args: Any) -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    attributes = vars(get_cuda_rng_tracker())
    before = attributes.get(_OPEN, [])
    attributes[_OPEN] = list(ctx.open_forks)
    try:
        return original(ctx, *args)
    finally:
        attributes[_OPEN] = before


def _sample(original: Callable[..., Any], self: Any, idx: int | None) -> Any:
    """The cached mask is all ones (it is cached only then), and the original writes zeros into it where
    this sample is padded: each sample gets its own, so that it keeps no zeros of the samples before."""
    if self.masks_and_position_ids_are_cached:
        self.cached_loss_mask = self.cached_loss_mask.new_ones(self.cached_loss_mask.shape)
    return original(self, idx)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="errata.sequence_parallel_dropout",
            target="megatron.core.transformer.transformer_block:TransformerBlock.forward",
            kind="wrap",
            feature="errata",
            reason="with sequence parallelism all tensor-parallel ranks drop the same positions of different "
            "tokens (NVIDIA/Megatron-LM #1256)",
            body=_block_forward,
            digest="9ead4f871ac6de66bc6c4f12caf1dc0a492b2382015bd3bfcd657f3c80693476",
            after=("errata.nested_forks",),
        ),
        Patch(
            id="errata.nested_forks",
            target=f"{_RANDOM}:CudaRNGStatesTracker.fork",
            kind="wrap",
            feature="errata",
            reason="a fork inside a fork of the same stream repeats its numbers and loses its advance",
            body=_fork,
            digest="ad1fa44b31f8764f54b6ba14dfff98d0ed9d2f493b64170b7a6c2f5003b2b9fd",
        ),
        Patch(
            id="errata.recomputed_forks",
            target=f"{_RANDOM}:CheckpointFunction.forward",
            kind="wrap",
            feature="errata",
            reason="recomputation replays the random numbers of the forks that were open in the forward pass "
            "and computes in the types of its autocast",
            body=_checkpoint_forward,
            digest="4902e6427316049dfbda728d39ae962a4349b79987aa9bab977fb51e8b0ec1e3",
            after=("errata.nested_forks",),
        ),
        Patch(
            id="errata.recomputed_forks_backward",
            target=f"{_RANDOM}:CheckpointFunction.backward",
            kind="wrap",
            feature="errata",
            reason="recomputation replays the random numbers of the forks that were open in the forward pass",
            body=_checkpoint_backward,
            digest="7b3a1279aaa63de75a885d6638ad5114cdfb1aa0c71a095d962687e4255475ef",
            after=("errata.recomputed_forks",),
        ),
        Patch(
            id="errata.cached_loss_mask",
            target="megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
            kind="wrap",
            feature="errata",
            reason="padding of one sample stays masked in all later samples: the cached loss mask is "
            "overwritten in place (NVIDIA/Megatron-LM #1269, #1711, #6981)",
            body=_sample,
            digest="7ca1b441b2a05b70d827751f6fea1bfd583cb88606f60e3cf0dd080d020f455c",
        ),
    ]

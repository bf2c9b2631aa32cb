"""Defects of Megatron-Core 0.9.0 that give wrong numbers without a message, with upstream's issues (#) and
internal merge requests (!)."""

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


def _reduce(original: Callable[[Any], Any], input_: Any) -> Any:
    return original(input_.contiguous())


def _p2p_ops(original: Callable[..., list[Any]], **kwargs: Any) -> list[Any]:
    """Send another tensor of the same storage: ``deallocate_pipeline_outputs`` swaps the ``.data`` of an
    output while it is sent, and a pending transfer holds the tensor."""
    for name in ("tensor_send_prev", "tensor_send_next"):
        if kwargs[name] is not None:
            kwargs[name] = kwargs[name].detach()
    return original(**kwargs)


def _sequence_pointers(original: Callable[..., list[int]], self: Any, sequence_lengths: Any) -> list[int]:
    """Lengths of an index that is merged are int32, and so is their sum under numpy 2."""
    return original(self, [int(length) for length in sequence_lengths])


def _get(original: Callable[..., Any], self: Any, idx: Any, offset: Any = 0, length: Any = None) -> Any:
    """``GPTDataset`` has offsets in int32, and so is their product with a token's bytes under numpy 2."""
    return original(self, idx, int(offset), length)


def _masked_words(original: Callable[..., dict[str, Any]], self: Any, idx: int) -> dict[str, Any]:
    """Masks and token types are padded with the padding token's id, which not every vocabulary has at 0."""
    import numpy

    sample = original(self, idx)
    length = numpy.trim_zeros(sample["text"] - self.config.tokenizer.pad, "b").size
    sample["padding_mask"][length:] = sample["types"][length:] = 0
    return sample


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
            reason="a fork inside a fork of the same stream repeats its numbers and loses its advance "
            "(NVIDIA/Megatron-LM #2641)",
            body=_fork,
            digest="ad1fa44b31f8764f54b6ba14dfff98d0ed9d2f493b64170b7a6c2f5003b2b9fd",
        ),
        Patch(
            id="errata.recomputed_forks",
            target=f"{_RANDOM}:CheckpointFunction.forward",
            kind="wrap",
            feature="errata",
            reason="recomputation replays the random numbers of the forks that were open in the forward pass "
            "and computes in the types of its autocast (no issue upstream)",
            body=_checkpoint_forward,
            digest="4902e6427316049dfbda728d39ae962a4349b79987aa9bab977fb51e8b0ec1e3",
            after=("errata.nested_forks",),
        ),
        Patch(
            id="errata.recomputed_forks_backward",
            target=f"{_RANDOM}:CheckpointFunction.backward",
            kind="wrap",
            feature="errata",
            reason="recomputation replays the random numbers of the forks that were open in the forward pass "
            "(no issue upstream)",
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
        Patch(
            id="errata.masked_words_padding",
            target="megatron.core.datasets.bert_dataset:BERTMaskedWordPieceDataset.__getitem__",
            kind="wrap",
            feature="errata",
            reason="where the id of the padding token is not 0 tokens attend to padding, which has another "
            "token type (no issue upstream)",
            body=_masked_words,
            digest="9dc2b5c91140ea73384b0baf5055932b845e5e52fb09723a8dcf8d1192f526d2",
        ),
        Patch(
            id="errata.reduce_strided",
            target="megatron.core.tensor_parallel.mappings:_reduce",
            kind="wrap",
            feature="errata",
            reason="a tensor that is not contiguous is summed in a copy and returned as it was "
            "(NVIDIA/Megatron-LM #5338)",
            body=_reduce,
            digest="e44b413ed10adfb74ea5d94592da43e5203b73ea9f05b8790d54b6be26806fda",
        ),
        Patch(
            id="errata.sent_outputs",
            target="megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
            kind="wrap",
            feature="errata",
            reason="an interleaved schedule with overlap_p2p_comm frees an output while it is sent: the next "
            "stage computes on other values (NVIDIA/Megatron-LM #4047)",
            body=_p2p_ops,
            digest="0ac270f03d1f127aa96e6f80815a17644993c11c656cf91cd4641a04358f1598",
        ),
        Patch(
            id="errata.sequence_pointers",
            target="megatron.core.datasets.indexed_dataset:_IndexWriter._sequence_pointers",
            kind="wrap",
            feature="errata",
            reason="merged indexes point to other tokens beyond 2 GiB (NVIDIA/Megatron-LM !3323)",
            body=_sequence_pointers,
            requires={"numpy": ">=2"},
            digest="f6711555cd00da7f21036df45d4db4c4dbfc9e3797de4bf9fb644ad3721c721c",
        ),
        Patch(
            id="errata.document_offsets",
            target="megatron.core.datasets.indexed_dataset:IndexedDataset.get",
            kind="wrap",
            feature="errata",
            reason="samples beyond 2 GiB of a document have other tokens (NVIDIA/Megatron-LM #3306)",
            body=_get,
            requires={"numpy": ">=2"},
            digest="2ae95b0dfc748bf6093909c7621de0dfe39b75ad784783e9400b849f489c03af",
        ),
    ]

"""Buckets of the gradient buffer: shared parameters, and gathers in another order than the buckets'."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch

if TYPE_CHECKING:
    from torch.nn import Parameter


def _buffer(
    original: Callable[..., None],
    self: Any,
    ddp_config: Any,
    param_dtype: Any,
    grad_dtype: Any,
    params: list[Any],
    data_parallel_group: Any,
    bucket_size: int | None,
    param_to_name: dict[Any, str],
    gradient_scaling_factor: float,
    param_indices: list[int],
) -> None:
    """Upstream closes the bucket before a shared parameter at a multiple of lcm(data-parallel size, 128), but
    moves the parameter there only from where the data-parallel size does not divide: padding, as a parameter
    in the bucket before, fills the rest."""
    padding: dict[Any, Parameter] = {}
    if ddp_config.use_distributed_optimizer:
        padding = _padding(params, param_dtype, data_parallel_group, bucket_size)
    filled = [each for param in params for each in ([padding[param], param] if param in padding else [param])]
    names = {
        **param_to_name,
        **{pad: f"padding after {param_to_name[param]}" for param, pad in padding.items()},
    }
    original(
        self,
        ddp_config,
        param_dtype,
        grad_dtype,
        filled if padding else params,
        data_parallel_group,
        bucket_size,
        names if padding else param_to_name,
        gradient_scaling_factor,
        param_indices,
    )
    if padding:
        _remove(self, params, set(padding.values()))


def _padding(
    params: list[Any], dtype: Any, data_parallel_group: Any, bucket_size: int | None
) -> dict[Any, Parameter]:
    """Parameter of the distributed optimizer's buffer -> the padding that follows it in there."""
    import torch

    from mt_megatron.parallel.gradient_buckets import aligned, buckets_of

    ranks = torch.distributed.get_world_size(group=data_parallel_group)
    backwards = params[::-1]
    sizes = [(each.nelement(), getattr(each, "shared_embedding", False)) for each in backwards]
    found, count = {}, 0
    for bucket in buckets_of(sizes, ranks, bucket_size):
        count += len(bucket.spans)
        last, end = backwards[count - 1], aligned(bucket.spans[-1][1])
        missing = bucket.start + bucket.numel_unpadded - end
        if missing > 0 and end % ranks == 0:  # Elsewhere upstream pads.
            values = torch.zeros(missing, dtype=dtype, device=last.device)
            found[last] = torch.nn.Parameter(values, requires_grad=False)
    return found


def _remove(buffer: Any, params: list[Any], padding: set[Any]) -> None:
    buffer.params = params
    for each in padding:
        del buffer.param_index_map[each], buffer.param_to_bucket[each]
    for bucket in buffer.buckets:
        bucket.params_list = [each for each in bucket.params_list if each not in padding]
        bucket.params -= padding


def _finish_param_sync(
    original: Callable[..., None], self: Any, skip_next_bucket_dispatch: bool = False
) -> None:
    """The next bucket's module may have run already, and have gathered for itself."""
    following = self.next_param_gather_bucket_group
    gathered = following is not None and following.param_gather_dispatched
    original(self, skip_next_bucket_dispatch or gathered)


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="errata.shared_parameters",
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
            kind="wrap",
            feature="errata",
            reason="with the distributed optimizer a shared embedding may start before its bucket and end in "
            "'Param should not be in param_gbuf_map' (NVIDIA/Megatron-LM #835)",
            body=_buffer,
            digest="d89e16e54a4159f43b30c2014af7cf79ed347d8d407741c8e8bbb66438a65823",
        ),
        Patch(
            id="errata.gathered_bucket",
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync",
            kind="wrap",
            feature="errata",
            reason="with overlap_param_gather a parameter that fills a bucket, used in another order than it "
            "was registered, is gathered twice or fails (NVIDIA/Megatron-LM !2673)",
            body=_finish_param_sync,
            digest="ff44ad2e75eee6a49e4c4355e0c8564c14f6c610a3a1f0c7bfcbc36c09bafc53",
        ),
    ]

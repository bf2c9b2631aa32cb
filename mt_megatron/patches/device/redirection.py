"""Megatron's modules see the active backend where they say ``torch.cuda``; nobody else does."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.backends.namespace import ModuleView
from mt_megatron.backends.translate import DeviceTranslator
from mt_megatron.patches.device.scope import PREFIXES
from mt_megatron.patching.spec import Patch

_TYPE_STRINGS = (
    (
        "optimizer_float16",
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
        "25066be62d7cc0745738bf273f6374561796450d1303a6034f7532bc0e43b531",
    ),
    (
        "optimizer_distributed",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        "55439de415119aafbd2cc0b7b0df2c83b18fc54b739b6bb0c9ea186e23a641b9",
    ),
    (
        "clip_grads",
        "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
        "ee1e21a1e271b7401adc914bd249fafd5967d9868a010299fdf71e948417ed7c",
    ),
)


def _type_strings(device_type: str) -> dict[str, str]:
    prefix = "torch." if device_type == "cpu" else f"torch.{device_type}."
    return {f"torch.cuda.{kind}Tensor": f"{prefix}{kind}Tensor" for kind in ("Half", "BFloat16", "Float")}


def patches(backend: Backend) -> list[Patch]:
    """Nothing for a backend that is CUDA itself."""
    if not backend.needs_redirection:
        return []
    import torch

    overrides = dict(backend.torch_overrides())
    view = ModuleView(torch, overrides)

    def see(name: str, module: str, attribute: str, replacement: Any) -> Patch:
        return Patch(
            id=f"device.{name}",
            target=f"{module}:{attribute}",
            kind="rebind",
            feature="device",
            scope=PREFIXES,
            reason=f"{module}{'.' + attribute if attribute else ''} means the {backend.name} device there",
            body=lambda original: replacement,
        )

    found = [see("torch", "torch", "", view)]
    for name in ("cuda", "distributed", "amp"):
        seen = getattr(view, name)
        if isinstance(seen, ModuleType) and seen is not getattr(torch, name):
            found.append(see(f"torch_{name}", f"torch.{name}", "", seen))
    cuda = view.cuda
    for name, module, attribute, replacement in (
        ("lazy_call", "torch.cuda", "_lazy_call", cuda._lazy_call),
        ("device_context", "torch.cuda", "device", cuda.device),
        ("amp_custom_fwd", "torch.cuda.amp", "custom_fwd", cuda.amp.custom_fwd),
        ("amp_custom_bwd", "torch.cuda.amp", "custom_bwd", cuda.amp.custom_bwd),
        (
            "init_process_group",
            "torch.distributed",
            "init_process_group",
            view.distributed.init_process_group,
        ),
        ("new_group", "torch.distributed", "new_group", view.distributed.new_group),
        ("barrier", "torch.distributed", "barrier", view.distributed.barrier),
    ):
        found.append(see(name, module, attribute, replacement))
    if backend.device_type != "cpu":
        # Megatron keeps these in tuples, by which it tells what to convert to half precision.
        for kind in ("Float", "Half", "BFloat16"):
            name = f"{kind}Tensor"
            found.append(see(f"type_{kind.lower()}", "torch.cuda", name, getattr(cuda, name)))
    found += [
        Patch(
            id=f"device.type_strings_{name}",
            target=target,
            kind="constant",
            feature="device",
            reason="it compares tensor types with CUDA's names",
            body=_present(target, _type_strings(backend.device_type)),
            digest=digest,
        )
        for name, target, digest in _TYPE_STRINGS
    ]
    if backend.device_type != "cpu":
        found.append(
            Patch(
                id="device.straggler_collective",
                target="megatron.core.utils:StragglerDetector.configure",
                kind="constant",
                feature="device",
                reason="with any library but nccl it gathers cpu tensors, which an accelerator's refuses",
                body={"nccl": backend.collective},
                digest="512b6207c31f91f220102cd7a9ebf0216b2ec3bec97509759497d67af2f5d76c",
            )
        )
    found.append(
        Patch(
            id="device.inference_tensor_check",
            target="megatron.core.inference.communication_utils:_is_cuda",
            kind="replace",
            feature="device",
            reason="it asserts is_cuda, which stays false for this backend's tensors",
            body=_on_device(backend.device_type),
            digest="ddaae7643c5d66538913d7296c929db8f48404ba30e64cc5c73ea9fa88a66e02",
        )
    )
    found.append(
        Patch(
            id="device.shard_memory",
            target="megatron.core.dist_checkpointing.mapping:ShardedTensor.init_data",
            kind="wrap",
            feature="device",
            reason="its default init_fn is the real torch.empty, bound before the module can be given a view",
            body=_init_data_on(DeviceTranslator(backend)),
            digest="f42124c5e75e67f4a68ce05d4af5f014e2f67ddfa82da1823b45de6ef2c24bfe",
        )
    )
    return found


def _init_data_on(translator: DeviceTranslator) -> Any:
    def init_data(original: Any, self: Any, device: Any, *args: Any, **kwargs: Any) -> None:
        original(self, translator.device(device), *args, **kwargs)

    return init_data


def _present(target: str, table: dict[str, str]) -> dict[str, str]:
    # clip_grads compares with the fp32 name alone; a literal that does not occur is an error.
    if target.endswith("clip_grad_by_total_norm_fp32"):
        return {k: v for k, v in table.items() if k.endswith(".FloatTensor")}
    return table


def _on_device(device_type: str) -> Any:
    def _is_cuda(tensor: Any) -> None:
        if tensor is None or tensor.device.type != device_type:
            found = "None" if tensor is None else f"a tensor on {tensor.device}"
            raise AssertionError(f"expected a tensor on {device_type}, got {found}")

    return _is_cuda

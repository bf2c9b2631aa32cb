"""Megatron-Core 0.9.0 on newer torch and numpy, whatever the device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.backends.namespace import ModuleView
from mt_megatron.patches.device.scope import PREFIXES
from mt_megatron.patching.spec import Patch


def _write_item_as_before(current: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``_write_item`` its four-argument form again.

    torch 2.7 put a chain of stream transforms in front and a later one a format at the end;
    ``FileSystemWriter`` itself passes no transforms and ``torch.save`` by default.
    """
    from torch.distributed.checkpoint import filesystem

    parameters = inspect.signature(current).parameters
    before: tuple[Any, ...] = ()
    after: dict[str, Any] = {}
    if "transforms" in parameters:
        before = (filesystem._StorageWriterTransforms(),)
    if "serialization_format" in parameters:
        after = {"serialization_format": filesystem.SerializationFormat.TORCH_SAVE}

    def _write_item(stream: Any, data: Any, write_item: Any, storage_key: str) -> Any:
        return current(*before, stream, data, write_item, storage_key, **after)

    return _write_item


def _numpy_with_product(numpy: ModuleType) -> ModuleView:
    return ModuleView(numpy, {"product": numpy.prod})


def trusted_globals() -> list[Any]:
    """Classes a checkpoint of Megatron may name and ``torch.load(weights_only=True)`` may build.

    Plain data only: building one of them runs no code of the file's choosing.
    """
    import argparse
    import enum
    import io
    import pathlib
    import types

    import numpy
    from megatron.core import enums
    from megatron.core.transformer import enums as transformer_enums

    choices = [
        member
        for module in (enums, transformer_enums)
        for member in vars(module).values()
        if isinstance(member, type) and issubclass(member, enum.Enum) and member.__module__ == module.__name__
    ]
    return [
        argparse.Namespace,
        types.SimpleNamespace,
        type(pathlib.Path()),
        io.BytesIO,
        numpy.ndarray,
        numpy.dtype,
        *_numpy_builders(),
        *(type(numpy.dtype(kind)) for kind in ("u1", "u4", "i4", "i8", "f4", "f8", "?")),
        *choices,
    ]


def _numpy_builders() -> list[tuple[Any, str]]:
    """The functions that build numpy's arrays and numbers, under the names that numpy 1 and numpy 2
    write into files: either reads the other's."""
    import numpy

    home = "numpy._core.multiarray" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else None
    module = import_module(home or "numpy.core.multiarray")
    return [
        (getattr(module, name), f"{package}.multiarray.{name}")
        for name in ("_reconstruct", "scalar")
        for package in ("numpy.core", "numpy._core")
    ]


def load_with_trusted_globals(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch

    with torch.serialization.safe_globals(trusted_globals()):
        return original(*args, **kwargs)


def patches(backend: Backend) -> list[Patch]:
    def trusted(name: str, target: str, digest: str) -> Patch:
        return Patch(
            id=f"compat.load_{name}",
            target=target,
            kind="wrap",
            feature="compat",
            requires={"torch": ">=2.6"},
            reason="torch.load builds plain weights only since 2.6; Megatron's own plain data is trusted",
            body=load_with_trusted_globals,
            digest=digest,
        )

    common = "megatron.core.dist_checkpointing.strategies.common:TorchCommonLoadStrategy"
    return [
        Patch(
            id="compat.write_item",
            target="torch.distributed.checkpoint.filesystem:_write_item",
            kind="rebind",
            feature="compat",
            scope=PREFIXES,
            requires={"torch": ">=2.7"},
            reason="its signature changed; 0.9.0 calls it with four arguments",
            body=_write_item_as_before,
        ),
        Patch(
            id="compat.numpy_product",
            target="numpy:",
            kind="rebind",
            feature="compat",
            scope=PREFIXES,
            requires={"numpy": ">=2"},
            reason="numpy 2 dropped np.product, which dist_checkpointing calls",
            body=_numpy_with_product,
        ),
        trusted(
            "common",
            f"{common}.load_common",
            "5930029c1de58a0b873dfacf93382be06af253e5effbddf7bb11c4245bd10a1c",
        ),
        trusted(
            "sharded_objects",
            f"{common}.load_sharded_objects",
            "4430c16978c39c63f27020dcd7401b07f1698a050366d8563732d9292a75f49b",
        ),
        trusted(
            "distributed_optimizer",
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state",
            "61e85e0b20b28ca14f9db37ac364627db6ecc5ed5183de65b217a574ee2004f2",
        ),
        trusted(
            "chained_optimizer",
            "megatron.core.optimizer.optimizer:ChainedOptimizer.load_parameter_state",
            "a3ce895796e63b2784aeb447cf39dddd4a8ad15185811de49b681270fe0f76cc",
        ),
    ]

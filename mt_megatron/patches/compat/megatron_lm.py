"""Megatron-LM's ``megatron.training`` and ``megatron.legacy``, where a checkout of it is on the path.

Neither is in the wheel. Most of their code is met by the general redirection; what is declared here
asks for a compiler of CUDA, or for torch as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patches.compat.torch_numpy import load_with_trusted_globals
from mt_megatron.patching.spec import Patch


def _load_no_kernels(args: Any) -> None:
    """Upstream's function asks nvcc for its version, makes a folder, and compiles nothing."""


def _with_own_generator(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An iterator of a loader draws one seed for its workers. On CUDA that leaves the device's
    generator alone; here the loader needs a generator of its own for that."""
    import torch

    loader = original(*args, **kwargs)
    if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    return loader


def _import_spec(original: Callable[..., Any], module_path: Any) -> Any:
    found = original(module_path)
    if found is None:
        import_module(module_path[0])
    return found


def patches(backend: Backend) -> list[Patch]:
    """Those of Megatron-LM are optional: a script may put its checkout on ``sys.path`` itself."""
    found = [
        Patch(
            id="training.import_spec",
            target="megatron.core.transformer.spec_utils:import_module",
            kind="wrap",
            feature="compat",
            reason="it prints an ImportError and returns None, and the script fails later without the reason",
            body=_import_spec,
            digest="b83ae7a85bc91ac601ac3afc2411dfdd7bbef14c1ebd25c892273263c4ca7963",
        ),
        Patch(
            id="training.loader_generator",
            target="megatron.legacy.data.data_samplers:build_pretraining_data_loader",
            kind="wrap",
            feature="device",
            backends=frozenset({"cpu"}),
            reason="loaders draw from the host's generator, which on cpu is the device's too, so a "
            "resumed run would drop other units",
            body=_with_own_generator,
            digest="66268d5424ec0dbc84f235b760ed011120600de0bedb27ab77e633c9f07145b3",
            optional=True,
        ),
        Patch(
            id="training.load_checkpoint",
            target="megatron.training.checkpointing:_load_base_checkpoint",
            kind="wrap",
            feature="compat",
            requires={"torch": ">=2.6"},
            reason="torch.load builds plain weights only since 2.6; these files hold the arguments too",
            body=load_with_trusted_globals,
            digest="b30bf1f996beea4376f30d463f32bebe73f02a5d1be4c5f2c03821d92f1b4960",
            optional=True,
        ),
    ]
    if backend.needs_redirection:
        found.append(
            Patch(
                id="training.fused_kernels",
                target="megatron.legacy.fused_kernels:load",
                kind="replace",
                feature="device",
                reason="it runs CUDA's nvcc, to compile no kernel in the end",
                body=_load_no_kernels,
                digest="27212f80da6d79bfd980921112415ec3db98a2360deef20dce98bf9f728283d3",
                optional=True,
            )
        )
    if backend.needs_redirection and backend.collective != "gloo":
        found.append(
            Patch(
                id="training.signal_device",
                target="megatron.training.dist_signal_handler:get_device",
                kind="constant",
                feature="device",
                reason="it knows the collective libraries nccl and gloo only",
                body={"nccl": backend.collective},
                digest="ebcfa2fc49b48d24b28acf3bf19b32fc3bbee7a0a51ff7d7121ec1f76ec337a2",
                optional=True,
            )
        )
    return found

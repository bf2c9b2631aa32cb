"""The version of Transformer Engine is None where the package is absent, and below every minimum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _get_te_version(original: Callable[[], Any]) -> Any:
    try:
        return original()
    except ModuleNotFoundError as error:
        if error.name != "transformer_engine":
            raise
        return None


def _is_te_min_version(original: Callable[..., bool], version: str, check_equality: bool = True) -> bool:
    from megatron.core import utils

    return utils.get_te_version() is not None and original(version, check_equality)


def patches(backend: Backend) -> list[Patch]:
    def wrap(name: str, body: Callable[..., Any], digest: str) -> Patch:
        return Patch(
            id=f"transformer_engine.{name}",
            target=f"megatron.core.utils:{name}",
            kind="wrap",
            feature="compat",
            reason="it raises without Transformer Engine, where Retro's configuration and scripts only ask",
            body=body,
            digest=digest,
        )

    return [
        wrap(
            "get_te_version",
            _get_te_version,
            "6b36e5a442b35187eb7fb17c93b9f1c7d68db2d64d2dadef77537f5a0f9c9734",
        ),
        wrap(
            "is_te_min_version",
            _is_te_min_version,
            "c470e6f39ed01e715033d55600aa0e59f4b7cbba8cce1cbe139d872cd1b1dd0e",
        ),
    ]

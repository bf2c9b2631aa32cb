"""Entry of the processes of ``test_shared_memory``."""

from __future__ import annotations

from typing import Any

from tests.comm.shared_memory import ends, flow, leases, messages

_FUNCTIONS = {**vars(flow), **vars(leases), **vars(messages), **vars(ends)}


def several(names: list[str], helper: str) -> dict[str, Any]:
    """What functions of this folder return, or the text of their errors, by name."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = _FUNCTIONS[name](helper)
        except Exception as error:  # noqa: BLE001 - shown by the test of that name.
            found[name] = f"{type(error).__name__}: {error}"
    return found

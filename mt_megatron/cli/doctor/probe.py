"""Run by ``doctor`` in a process of its own: what torch, the backends and the patches say.

A broken torch can end its process or hang in its import; then this process is lost, not doctor.
Prints a line with a marker and JSON for each part as soon as it is known.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARKER = "mt-megatron doctor probe: "
PARTS = {
    "torch_facts": "torch",
    "backend_facts": "backends",
    "selected": "choice",
    "channels": "channels",
    "patches": "patches",
}
"""Function of this module -> what it looks at."""


def torch_facts() -> dict[str, Any]:
    """torch's build and collectives. Raises whatever importing torch raises."""
    import torch
    import torch.distributed as dist

    from mt_megatron.fp8.kernels import libraries

    available = dist.is_available()
    return {
        "version": torch.__version__,
        "path": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "collectives": {
            "gloo": bool(available and dist.is_gloo_available()),
            "nccl": bool(available and dist.is_nccl_available()),
            "mpi": bool(available and dist.is_mpi_available()),
        },
        "fp8_libraries": libraries(),
    }


def backend_facts() -> dict[str, Any]:
    """Every installed backend: whether it can be used, why, and its devices."""
    from mt_megatron.backends import registry

    found: dict[str, Any] = {}
    for name in registry.names():
        try:
            backend = registry.get(name)
            usable, why = backend.available()
            found[name] = {"available": usable, "why": why, "collective": backend.collective, "devices": []}
            if usable:
                found[name]["devices"] = [backend.device_name(i) for i in range(backend.device_count())]
                found[name]["memory_bytes"] = backend.total_memory()
                found[name]["bf16"] = backend.bf16_supported()
                found[name]["fp8"] = list(backend.fp8_granularities())
                found[name]["capabilities"] = _capabilities(backend.device_type, backend.device_count())
                found[name]["telemetry"] = backend.telemetry(backend.current_device()).plain()
        except Exception as error:  # noqa: BLE001 - one backend's trouble must not hide the others.
            found[name] = {"available": False, "why": f"{type(error).__name__}: {error}", "devices": []}
    return found


def _capabilities(device_type: str, count: int) -> list[tuple[int, int]]:
    import torch

    of_device = getattr(getattr(torch, device_type, None), "get_device_capability", None)
    return [] if of_device is None else [of_device(index) for index in range(count)]


def selected() -> dict[str, str]:
    """The backend that ``auto`` takes, and why."""
    from mt_megatron.backends import registry

    backend, why = registry.select("auto")
    return {"name": backend.name, "why": why}


def channels() -> dict[str, Any]:
    """Transports between the stages of a pipeline: whether each works on this machine, and how or why not."""
    from mt_megatron.comm import kinds
    from mt_megatron.comm.shared_memory import native

    helper = native.describe()
    how = {
        "shm": "C helper" if helper["uses"] == "native" else f"in Python alone: {helper['why']}",
        "rdma": "a verbs device can be opened",
        "nixl": "its library is installed",
        "collective": "Gloo, NCCL or MCCL, as Megatron-Core itself does",
    }
    refused = {name: kinds.why_not(name) for name in kinds.KINDS}
    found: dict[str, Any] = {
        name: {"works": why is None, "why": why or how[name]} for name, why in refused.items()
    }
    found["shm"]["uses"] = helper["uses"]
    return found


def patches() -> dict[str, Any]:
    """Whether the patches of the backend that ``auto`` takes fit what is installed."""
    from mt_megatron.cli.patches import examine

    found = examine("auto")
    return {
        "ok": found["ok"],
        "backend": found.get("backend"),
        "applicable": len(found.get("patches", [])),
        "left_out": len(found.get("left_out", [])),
        "plan_digest": found.get("plan_digest"),
        "problems": [f"{each['error']}: {each['message']}" for each in found["problems"]],
    }


def main() -> int:
    """Print the facts; each part that fails reports its error in place of its facts."""
    for part in PARTS:
        try:
            facts = globals()[part]()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the report.
            facts = {"error": f"{type(error).__name__}: {error}"}
            if part == "patches":
                facts["ok"] = False
        # On a line of its own, whatever torch has printed.
        print(f"\n{MARKER}{json.dumps([part, facts])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

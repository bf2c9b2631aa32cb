"""What can be told about a machine and its Python without importing torch or megatron."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

REQUIRED = {
    "megatron-core": "==0.9.0",
    "torch": ">=2.7,<=2.13.0",
    "numpy": ">=1.26",
    "packaging": ">=23",
    "einops": ">=0.7",
    "psutil": ">=5.9",
    "pyyaml": ">=6.0",
    "pydantic": ">=2.7",
    "tokenizers": ">=0.20",
    "rich": ">=13.7",
    "msgpack": ">=1.0.8",
}
"""Distributions that this package needs and the versions it declares; kept equal to pyproject.toml."""

OPTIONAL = (
    "transformer-engine",
    "deep-gemm",
    "apex",
    "flash-attn",
    "transformers",
    "torch-musa",
    "nvidia-ml-py",
    "mthreads-ml-py",
    "sentencepiece",
    "zstandard",
    "pyarrow",
    "tensorboard",
    "wandb",
)
"""Distributions that are reported when present; none of them is imported."""

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_ENVIRONMENT = (
    "CUDA_",
    "GLOO_",
    "MCCL_",
    "MKL_",
    "MT_MEGATRON_",
    "MUSA_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "TORCH_",
)
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def versions() -> dict[str, Any]:
    """Python and every distribution's version by its metadata; None when it is not installed."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
    }
    for name in (*REQUIRED, *OPTIONAL):
        found[name] = distribution_version(name)
    return found


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, by its metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def version_problems(found: dict[str, Any]) -> list[str]:
    """Required distributions that are missing or outside what this package declares."""
    problems = []
    if distribution_version("packaging") is None:
        return ["packaging is not installed, so no version can be compared: pip install packaging"]
    from packaging.specifiers import SpecifierSet

    for name, specifier in REQUIRED.items():
        version = found[name]
        if version is None:
            problems.append(f"{name} is not installed: pip install '{name}{specifier}'")
        elif not SpecifierSet(specifier).contains(version.partition("+")[0], prereleases=True):
            problems.append(f"{name} is {version}; expected {specifier}: pip install '{name}{specifier}'")
    return problems


def system() -> dict[str, Any]:
    """Operating system, processor, memory, and the shared memory that data loaders use."""
    found: dict[str, Any] = {
        "os": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": platform.processor() or None,
        "cpu_flags": [],
        "cores": os.cpu_count(),
        "cores_allowed": None,
        "memory_bytes": None,
        "memory_available_bytes": None,
        "shared_memory_free_bytes": None,
        "open_files": None,
    }
    found.update(_cpuinfo())
    if importlib.util.find_spec("psutil") is not None:
        from mt_megatron.host import limits

        memory, shared = limits.memory(), limits.shared_memory()
        found["memory_bytes"], found["memory_available_bytes"] = memory.total, memory.available
        found["shared_memory_free_bytes"] = None if shared is None else shared.available
        found["cores_allowed"], found["open_files"] = limits.processors(), limits.open_files()
    return found


def _cpuinfo() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found: dict[str, Any] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            found.setdefault("cpu", value.strip())
        elif key.strip() in ("flags", "Features"):
            found.setdefault("cpu_flags", [flag for flag in _CPU_FLAGS if flag in value.split()])
    return found


def platform_problems(found: dict[str, Any], version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """Why this platform is not supported; empty on a supported one."""
    problems = []
    if found["os"] == "Windows":
        problems.append(
            "Windows is not supported: megatron-core 0.9.0 has no wheel for it. Use Linux, "
            "for example in WSL 2."
        )
    elif found["os"] != "Linux":
        problems.append(
            f"{found['os']} is not supported: megatron-core 0.9.0 has wheels for Linux alone. "
            "Use Linux, for example in a container."
        )
    elif found["machine"] not in ("x86_64", "AMD64"):
        problems.append(
            f"{found['machine']} has no wheel of megatron-core 0.9.0 (x86_64 alone has). Its Python files "
            "run when unpacked onto the path, but its compiled dataset helper has to be built there."
        )
    if version not in ((3, 10), (3, 11)):
        problems.append(
            f"Python {version[0]}.{version[1]} is not supported: megatron-core 0.9.0 has wheels for 3.10 and "
            "3.11. Make an environment with one of them."
        )
    if platform.python_implementation() != "CPython":
        problems.append(f"{platform.python_implementation()} is not supported. Use CPython 3.10 or 3.11.")
    return problems


def megatron_core() -> dict[str, Any]:
    """Where megatron.core is, and what else shares its namespace; nothing of it is imported."""
    found: dict[str, Any] = {"path": None, "namespace": [], "dataset_helper": None, "training": None}
    try:
        namespace = importlib.util.find_spec("megatron")
        core = importlib.util.find_spec("megatron.core") if namespace else None
    except (ImportError, ValueError):
        return found
    if namespace is not None and namespace.submodule_search_locations is not None:
        found["namespace"] = [str(each) for each in namespace.submodule_search_locations]
        for each in found["namespace"]:
            if Path(each, "training").is_dir():
                found["training"] = str(Path(each, "training"))
    if core is not None and core.submodule_search_locations:
        root = Path(next(iter(core.submodule_search_locations)))
        found["path"] = str(root)
        suffixes = importlib.machinery.EXTENSION_SUFFIXES
        helpers = [root / "datasets" / f"helpers{suffix}" for suffix in suffixes]
        found["dataset_helper"] = next((str(each) for each in helpers if each.exists()), None)
    return found


def megatron_problems(found: dict[str, Any]) -> list[str]:
    """What is wrong with the installed megatron.core."""
    if found["path"] is None:
        return ["megatron.core cannot be found: pip install megatron-core==0.9.0"]
    if found["dataset_helper"] is None:
        return [
            (
                f"{found['path']}/datasets has no compiled helper for this Python, so training data cannot "
                "be indexed: pip install --force-reinstall --no-deps megatron-core==0.9.0"
            )
        ]
    return []


def network() -> dict[str, Any]:
    """What listens where in a run, and the interface that Gloo would take."""
    hostname = socket.gethostname()
    try:
        address: str | None = socket.gethostbyname(hostname)
    except OSError:
        address = None
    return {
        "hostname_address": address,
        "loopback_interface": _loopback_interface(),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME"),
        "listeners": [
            (
                "torch's rendezvous store (TCPStore, on MASTER_PORT or torchrun's endpoint) listens on all "
                "addresses, also when it is told 127.0.0.1: keep that port behind a firewall"
            ),
            (
                "Gloo listens on one interface: the cpu backend pins it to loopback on a single node; on "
                "several nodes it takes GLOO_SOCKET_IFNAME, or else the host name's address"
            ),
            (
                "mt_megatron answers clock pings while it trains: on loopback on a single node; on several "
                "nodes one rank of each does where others reach it, behind a random token (--scan off: none)"
            ),
        ],
    }


def _loopback_interface() -> str | None:
    if importlib.util.find_spec("psutil") is None:
        return None
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == "127.0.0.1" for each in addresses):
            return str(name)
    return None


def environment() -> dict[str, str]:
    """Variables that change how torch, the collective libraries or this package behave."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _RENDEZVOUS or name.startswith(_ENVIRONMENT)
    }

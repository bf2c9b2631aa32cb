"""Threads follow the cores per rank unless the user has said how many; freed memory can be kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mt_megatron.backends import host_process

CASES = [
    # environment, asked, what it must be with 8 cores
    ({}, None, 8),
    ({"LOCAL_WORLD_SIZE": "2"}, None, 4),
    ({"LOCAL_WORLD_SIZE": "3"}, None, 2),
    ({"LOCAL_WORLD_SIZE": "16"}, None, 1),
    ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None, 4),
    ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, None, None),
    ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None, None),
    ({"OMP_NUM_THREADS": "1"}, 5, 5),
]


@pytest.mark.parametrize(("environment", "asked", "expected"), CASES)
def test_threads(environment, asked, expected, monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    said: list[int] = []
    monkeypatch.setattr(host_process.torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(host_process.torch, "set_num_threads", said.append)
    found = host_process.set_threads(asked)
    assert (found, said) == ((77, []) if expected is None else (expected, [expected]))


FAULTS = """
import json, resource, sys, torch
from mt_megatron.backends.host_process import keep_freed_memory
torch.set_num_threads(1)
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
def step():
    held = [torch.ones(n << 20) for n in (1, 12, 3, 9, 16)]
    torch.ones(10 << 20)
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_pages_of_freed_tensors_are_not_asked_for_again():
    def faults(mode: str) -> tuple[bool | None, int]:
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True, timeout=60
        )
        return tuple(json.loads(done.stdout))

    # A busy machine takes pages away in between: what the process itself asks for is the least of some.
    kept, few = min(faults("keep") for _ in range(3))
    if not kept:
        pytest.skip("this C library has no mallopt")
    _, many = faults("default")
    # A step's tensors are 52,224 pages of 4 KiB; larger pages make it fewer.
    assert few < many / 10, (few, many)

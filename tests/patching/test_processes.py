"""Other processes: spawned workers start unpatched, forked ones patched, pickles go between both."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .conftest import Toy

MAIN = """
import multiprocessing, os, pickle, sys
from {toy} import owner
from mt_megatron.patching.digest import source_of
from mt_megatron.patching.engine import commit
from mt_megatron.patching.plan import make_plan
from mt_megatron.patching.spec import Patch


def apply():
    targets = {{"{toy}.owner:f": "wrap", "{toy}.owner:C.m": "wrap"}}
    return commit(make_plan([
        Patch(id=target, target=target, kind=kind, reason="a test", digest=source_of(target).digest,
              body=lambda original, *args: "patched")
        for target, kind in targets.items()
    ], backend="cpu"))


def work(call):
    return call(), "patched" if owner.f() == "patched" else "plain"


if os.environ.get("EVERYWHERE"):
    apply()

if __name__ == "__main__":
    applied = None if os.environ.get("EVERYWHERE") else apply()
    assert owner.f() == "patched"
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        for call in (owner.f, owner.C().m):
            print(*pool.apply(work, (call,)))
"""


def run(toy: Toy, method: str, **environment: str) -> list[str]:
    toy.write("owner", "def f(): return 'original'\nclass C:\n    def m(self): return 'original'\n")
    script = toy.folder / "main.py"
    script.write_text(textwrap.dedent(MAIN).format(toy=toy.name))
    done = subprocess.run(
        [sys.executable, str(script), method],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{toy.folder}:{Path(__file__).parents[2]}", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fresh_worker_starts_unpatched_and_reads_our_pickles(toy: Toy, method: str) -> None:
    assert run(toy, method) == ["original plain", "original plain"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fresh_worker_is_patched_by_a_main_module_that_patches(toy: Toy, method: str) -> None:
    assert run(toy, method, EVERYWHERE="1") == ["patched patched", "patched patched"]


def test_a_forked_worker_is_patched(toy: Toy) -> None:
    assert run(toy, "fork") == ["patched patched", "patched patched"]

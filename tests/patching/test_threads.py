"""Imports, commits and reverts that meet in several threads, or inside of each other."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from typing import Any

import pytest

from mt_megatron.errors import PatchError

from .conftest import Toy

OWNER = """
def f(): return "original"
class C:
    def m(self): return "original"
"""


@pytest.fixture
def toy(toy: Toy) -> Toy:
    toy.write("owner", OWNER)
    return toy


def wrap_f(toy: Toy) -> Any:
    return toy.patch("f", "wrap", lambda original: "patched")


def test_threads_that_import_at_the_same_time_all_see_the_patch(toy: Toy) -> None:
    toy.write("owner", "import time\ntime.sleep(0.05)\n" + OWNER)
    for index in range(8):
        toy.write(f"user{index}", "from {toy}.owner import f, C\nseen = (f(), C().m())\n")
    applied = toy.commit(wrap_f(toy), toy.patch("C.m", "wrap", lambda original, self: "patched"))
    start = threading.Barrier(8)
    seen: list[object] = []

    def load(index: int) -> None:
        start.wait(10)
        seen.append(toy.load(f"user{index}").seen)

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [("patched", "patched")] * 8
    applied.revert()
    assert [toy.load(f"user{index}").f() for index in range(8)] == ["original"] * 8


def test_owners_imported_by_several_threads_at_once(toy: Toy) -> None:
    for index in range(8):
        toy.write(f"owner{index}", f"import time\ntime.sleep(0.02)\ndef f(): return {index}\n")
    applied = toy.commit(
        *(
            toy.patch("f", "wrap", lambda original: original() + 100, module=f"owner{index}", id=str(index))
            for index in range(8)
        )
    )
    start = threading.Barrier(8)

    def load(index: int) -> None:
        start.wait(10)
        toy.load(f"owner{index}")

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [toy.load(f"owner{index}").f() for index in range(8)] == [100 + index for index in range(8)]
    assert len(applied.report().applied) == 8
    applied.revert()
    assert [toy.load(f"owner{index}").f() for index in range(8)] == list(range(8))


def test_a_body_may_wait_for_an_import_in_another_thread(toy: Toy) -> None:
    """It would not come back if a lock were held while bodies run."""
    toy.write("other", "def o(): return 'original'\n")
    loaded: list[types.ModuleType] = []

    def body(original: Any) -> Any:
        thread = threading.Thread(target=lambda: loaded.append(toy.load("other")))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        return original

    toy.commit(
        toy.patch("f", "value", body),
        toy.patch("o", "wrap", lambda original: "patched", module="other"),
    )
    toy.load()
    assert loaded[0].o() == "patched"


def test_a_commit_during_an_import_in_another_thread_waits_for_it(toy: Toy) -> None:
    toy.write(
        "owner",
        """
        import threading
        started, go_on = threading.Event(), threading.Event()
        import {toy}.control as control
        control.started.set()
        control.go_on.wait(20)
        """
        + OWNER.replace("\n", "\n        "),
    )
    toy.write("control", "import threading\nstarted, go_on = threading.Event(), threading.Event()\n")
    control = toy.load("control")
    patch = wrap_f(toy)
    thread = threading.Thread(target=toy.load)
    thread.start()
    assert control.started.wait(20)
    timer = threading.Timer(0.2, control.go_on.set)
    timer.start()
    toy.commit(patch)
    thread.join(20)
    assert toy.load().f() == "patched"


def test_a_commit_inside_of_the_import_of_an_owner_is_refused(toy: Toy) -> None:
    toy.write("owner", OWNER + "\nimport {toy}.control as control\ncontrol.act()\n")
    control = types.ModuleType(f"{toy.name}.control")
    importlib.import_module(toy.name)
    sys.modules[control.__name__] = control
    patch = wrap_f(toy)
    vars(control)["act"] = lambda: toy.commit(patch)
    with pytest.raises(PatchError, match="is being imported by the very code that calls patch"):
        toy.load()
    vars(control)["act"] = lambda: None
    assert toy.load().f() == "original"


def test_a_revert_inside_of_the_import_of_an_owner(toy: Toy) -> None:
    importlib.import_module(toy.name)
    control = types.ModuleType(f"{toy.name}.control")
    sys.modules[control.__name__] = control
    toy.write("owner", OWNER + "\nimport {toy}.control as control\ncontrol.act()\n")
    applied = toy.commit(wrap_f(toy))
    vars(control)["act"] = applied.revert
    assert toy.load().f() == "original", "what was closed meanwhile does not patch any more"

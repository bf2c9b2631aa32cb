"""Identity of the machine: which processes share a folder, and what containers have of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mt_megatron.host.machine import machine, place_of

_SAME = """
import sys
from mt_megatron.host.machine import machine, place_of
print(machine("time", "pid"), place_of(sys.argv[1]))
"""


def test_a_machine_is_the_same_in_every_process(tmp_path: Path) -> None:
    other = subprocess.run([sys.executable, "-c", _SAME, str(tmp_path)], capture_output=True, text=True)
    assert other.stdout.strip() == f"{machine('time', 'pid')} {place_of(tmp_path)}", other.stderr
    assert machine("pid").startswith(machine()) and machine("no such namespace") == machine()


def test_a_folder_is_the_same_by_one_path_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    found = {place_of(tmp_path / name) for name in ("", "other", "link")}
    assert len(found) == 3, "another path to it is not that of the socket"
    assert place_of(tmp_path) == place_of(tmp_path) and os.path.isdir(tmp_path)

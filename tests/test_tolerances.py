"""The recorder of tolerances sees every kind of comparison, and only those that come close."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import tolerances
from tests.launch import ROOT

CASES = """
import numpy as np, pytest, torch
def test_all():
    one = torch.ones(3)
    assert torch.allclose(one + 0.8, one, atol=1.0, rtol=0)     # 5
    assert torch.allclose(one + 0.4, one, atol=1.0, rtol=0)
    assert not torch.allclose(one + 1.2, one, atol=1.0, rtol=0)
    assert one.allclose(one + 0.8, atol=1.0, rtol=0)            # 8
    torch.testing.assert_close({"a": [one + 8e-6]}, {"a": [one]})  # 9
    torch.testing.assert_close(one, one)
    assert np.allclose([1.9], [1.0], atol=0.0, rtol=1.0)        # 11
    np.testing.assert_allclose(np.array([1.9]), [1.0], rtol=1.0)  # 12
    assert 1.0 + 8e-7 == pytest.approx(1.0)                     # 13
    assert {"a": 1.8} == pytest.approx({"a": 1.0}, abs=1.0)     # 14
    assert [1.8] == pytest.approx([1.0], abs=1.0)               # 15
    assert 1.4 == pytest.approx(1.0, abs=1.0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(one + 1, one)
"""


def test_comparisons_that_come_close_are_listed(tmp_path: Path) -> None:
    # Its own folder within tests/ is what the recorder takes for a test: the file stands in for one.
    script = tmp_path / "cases.py"
    script.write_text(CASES)
    code = (
        f"from tests import tolerances; tolerances._TESTS = {str(tmp_path) + '/'!r}; tolerances.install()\n"
        f"import runpy; runpy.run_path({str(script)!r})['test_all']()\n"
        "print(*tolerances.summary(), sep='\\n')"
    )
    environment = {**os.environ, tolerances.FOLDER: str(tmp_path / "found"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines()]
    assert sorted(lines) == [5, 8, 9, 11, 12, 13, 14, 15]

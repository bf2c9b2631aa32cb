"""Code that asks for Transformer Engine's version runs where the package is absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.launch import ROOT, run_command

ASK = """
import sys
import mt_megatron
{before}
mt_megatron.patch("cpu"{features})
from megatron.core.utils import get_te_version, is_te_min_version
from megatron.core.transformer import transformer_config as user
print(get_te_version(), is_te_min_version("0.1"), is_te_min_version("1.9.0", check_equality=False))
print(user.is_te_min_version is is_te_min_version, user.get_te_version())
mt_megatron.unpatch()
try: print(get_te_version())
except ModuleNotFoundError as error: print("missing", error.name)
"""


def run(code: str, folder: Path) -> list[str]:
    path = os.pathsep.join([str(ROOT), str(folder)])
    done = run_command(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, "PYTHONPATH": path}, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


BEFORE = "import megatron.core.transformer.transformer_config"


def test_an_absent_package_has_no_version_and_is_below_every_minimum(tmp_path: Path) -> None:
    """Where nothing stands in for its layers."""
    expected = ["None False False", "True None", "missing transformer_engine"]
    for before in ("", BEFORE):
        assert run(ASK.format(before=before, features=", features=['compat']"), tmp_path) == expected


def test_with_layers_in_its_place_the_version_is_the_one_that_they_are_shaped_like(tmp_path: Path) -> None:
    expected = ["1.9.0 True False", "True 1.9.0", "missing transformer_engine"]
    for before in ("", BEFORE):
        assert run(ASK.format(before=before, features=""), tmp_path) == expected


def test_an_installed_package_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine.py").write_text("__version__ = '1.7.0'\n")
    found = run(
        "import mt_megatron; report = mt_megatron.patch('cpu')\n"
        "from megatron.core.utils import get_te_version, is_te_min_version as at_least\n"
        "print(get_te_version(), at_least('1.7.0'), at_least('1.7.0', check_equality=False), at_least('2'))\n"
        "print({each.why for each in report.left_out if each.feature == 'te_layers'})\n"
        "try: import megatron.core.extensions.transformer_engine\n"
        "except AttributeError as error: print(error)",
        tmp_path,
    )
    # Upstream's own module is executed, on a package that has a version and nothing else.
    assert found[:2] == ["1.7.0 True False False", "{'transformer_engine can be imported'}"]
    assert "'pytorch'" in found[2]


def test_what_the_package_itself_lacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine.py").write_text("import absent_dependency\n")
    found = run(
        "import mt_megatron; mt_megatron.patch('cpu')\n"
        "from megatron.core.utils import get_te_version\n"
        "try: get_te_version()\n"
        "except ModuleNotFoundError as error: print(error.name)",
        tmp_path,
    )
    assert found == ["absent_dependency"]


def test_a_layer_spec_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    """Upstream prints it and returns None, with which a script fails far from the reason."""
    found = run(
        "import mt_megatron; mt_megatron.patch('cpu')\n"
        "from megatron.core.transformer.spec_utils import import_module\n"
        "print(import_module(('collections', 'OrderedDict')).__name__)\n"
        "try: import_module(('absent_specs', 'stack'))\n"
        "except ModuleNotFoundError as error: print(error.name)",
        tmp_path,
    )
    assert (found[0], found[-1]) == ("OrderedDict", "absent_specs")

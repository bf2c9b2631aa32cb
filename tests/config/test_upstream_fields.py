"""Megatron-Core's fields as read from source equal those of the imported dataclasses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mt_megatron.config import types as config_types
from mt_megatron.config import upstream_fields as config_core
from mt_megatron.config.upstream_fields import DDP, OPTIMIZER, TRANSFORMER, core_fields
from mt_megatron.errors import ConfigError
from tests.launch import run_command

_IMPORTED = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
from megatron.core.transformer import TransformerConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.distributed import DistributedDataParallelConfig
def plain(value):
    if callable(value):
        return value.__name__
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
print(json.dumps([
    {f.name: plain(f.default) for f in dataclasses.fields(c) if not f.name.startswith("_")}
    for c in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
]))
"""


def run_python(code: str, *, cold: bool = False) -> str:
    """The standard output of ``code`` in a process of its own."""
    done = run_command([sys.executable, "-c", code], cold=cold)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_source_gives_the_fields_and_defaults_of_the_imported_dataclasses() -> None:
    imported = json.loads(run_python(_IMPORTED).splitlines()[-1])
    for which, expected in zip((TRANSFORMER, OPTIMIZER, DDP), imported, strict=True):
        assert {name: field.default for name, field in core_fields(which).items()} == expected


def test_every_core_field_is_settable_held_by_our_sections_or_named_as_not_settable() -> None:
    settable = config_types.options()
    for which in (TRANSFORMER, OPTIMIZER, DDP):
        for name in core_fields(which):
            assert (name in settable) != (name in config_types.NOT_SETTABLE), name


def test_tables_about_core_fields_name_core_fields_only() -> None:
    core = {name for which in (TRANSFORMER, OPTIMIZER, DDP) for name in core_fields(which)}
    for table in (config_types.NOT_SETTABLE, config_types.CHOICES, config_types.DEFAULTS):
        assert set(table) <= core


def test_every_option_has_a_meaning_and_a_default_of_its_own_type() -> None:
    for option in config_types.options().values():
        assert option.doc, option.name
        assert config_types.convert(option, option.default, "test") == option.default


def test_parsing_imports_neither_torch_nor_megatron_core() -> None:
    loaded = run_python(
        "import sys\n"
        "from mt_megatron.config.parse import load_config, option_help\n"
        "from mt_megatron.training.validate import problems\n"
        "problems(load_config(['--model', 'llama3_8b'])); option_help()\n"
        "print([m for m in ('torch', 'megatron.core', 'numpy') if m in sys.modules])",
        cold=True,
    )
    assert loaded.strip() == "[]"


def test_missing_megatron_core_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_core.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install megatron-core==0\.9\.0"):
        config_core.core_root()


@pytest.mark.parametrize(
    ("source", "message"),
    [(None, "cannot be read"), ("class Other: pass", "no class"), ("def (", "cannot be read")],
)
def test_damaged_megatron_core_is_named(tmp_path: Path, source: str | None, message: str) -> None:
    if source is not None:
        (tmp_path / "optimizer").mkdir()
        (tmp_path / "optimizer" / "optimizer_config.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        config_core._read(OPTIMIZER, tmp_path)


def test_an_unknown_annotation_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "optimizer_config.py").write_text(
        "class OptimizerConfig:\n    a: complex = 1\n    '''Text.'''\n"
    )
    (field,) = config_core._read(OPTIMIZER, tmp_path).values()
    assert (field.name, field.default, field.doc) == ("a", 1, "Text.")
    with pytest.raises(ConfigError, match="'complex'"):
        config_types._core_option("optimizer", field)

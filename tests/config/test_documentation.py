"""The YAML and the command lines that the documentation and the examples show are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mt_megatron.config.megatron_lm_arguments import ALIASES
from mt_megatron.config.parse import load_config
from mt_megatron.config.types import SECTIONS, options
from mt_megatron.training.validate import problems

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "03-configuration.md").read_text()
EXAMPLES = sorted(set((ROOT / "examples").rglob("*.yaml")) - set((ROOT / "examples" / "layouts").iterdir()))


def test_the_documented_file_loads_and_passes(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = load_config(["--lr", "1e-4", "--no-sequence-parallel"], path)
    assert problems(config, world_size=2, check_files=False) == []
    assert config.data.data_path == ("0.7", "data/books", "0.3", "data/code")


def test_every_section_is_documented() -> None:
    for section in SECTIONS:
        assert f"| `{section}` |" in DOCUMENT


def test_documented_option_names_exist() -> None:
    known = set(options()) | {name.replace("-", "_") for name in ALIASES} | set(SECTIONS)
    known |= {
        "params_dtype",
        "pipeline_dtype",
        "batch_p2p_comm",
        "config",
        "list_models",
        "list_options",
        "no_sequence_parallel",
    }
    known |= {"no_bf16"}
    for name in re.findall(r"(?<![\w/-])--([a-z][a-z0-9-]+)", DOCUMENT):
        assert name.replace("-", "_") in known, name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_load_and_pass(path: Path) -> None:
    config = load_config([], path)
    parallel = config.parallel
    world = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
        * parallel.expert_model_parallel_size
    )
    assert problems(config, world_size=world, check_files=False) == []


def test_the_documented_command_line_is_understood() -> None:
    text = (ROOT / "docs" / "01-getting-started.md").read_text()
    (command,) = re.findall(r"mt_megatron\.cli pretrain (.*?)```", text, flags=re.DOTALL)
    config = load_config(shlex.split(command.replace("\\\n", " ")))
    assert problems(config, world_size=2, check_files=False) == []

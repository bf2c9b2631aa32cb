"""The YAML, commands, program, defaults and links that the documentation and the examples show are valid."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from mt_megatron.cli.commands import COMMANDS
from mt_megatron.config.megatron_lm_arguments import ALIASES
from mt_megatron.config.parse import load_config
from mt_megatron.config.types import SECTIONS, options
from mt_megatron.training.validate import problems
from tests.launch import run_command

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


def test_the_table_of_differences_has_the_defaults() -> None:
    """A default is the third column's first word: a number, on or off."""
    literal = {"on": True, "off": False}
    table = DOCUMENT.split("| option | Megatron-LM 0.9 | here |")[1].split("\n\n")[0]
    compared = set()
    for name, here in re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", table, flags=re.MULTILINE):
        word = re.split(r"[ ,:]", here)[0]
        default = options()[name].default
        if default is not None and (word in literal or re.fullmatch(r"[\d.]+", word)):
            assert literal.get(word, word) == (default if word in literal else str(default)), name
            compared.add(name)
    assert {"adam_beta2", "weight_decay", "micro_batch_size", "attention_softmax_in_fp32"} <= compared


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*/README.md"))


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


def _links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in _links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_readme_is_short_and_links_every_page_once() -> None:
    counted = Counter(_links(ROOT / "README.md"))
    assert {str(page.relative_to(ROOT)): counted[str(page.relative_to(ROOT))] for page in PAGES[2:]} == {
        str(page.relative_to(ROOT)): 1 for page in PAGES[2:]
    }
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_the_commands_of_the_program_are_in_the_table() -> None:
    shown = (ROOT / "docs" / "01-getting-started.md").read_text()
    assert set(re.findall(r"^\| `mt-megatron (\w+)", shown, flags=re.MULTILINE)) == set(COMMANDS)


def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_command([sys.executable, str(path)], cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    loss, device = done.stdout.split()
    assert device.split(":")[0] in ("cpu", "cuda", "musa")
    # Logits are sums of 64 normalised values times weights of deviation 0.02: the loss of one token is the
    # logarithm of the vocabulary, give or take a logit's deviation, and the mean of 32 is nearer to it.
    assert float(loss) == pytest.approx(math.log(128), abs=0.02 * math.sqrt(64))

"""The recipe of docs/21-convert.md for logits of a converted checkpoint, run as it stands there."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path

import torch

from tests.convert import published
from tests.convert.recorded_run import converted
from tests.launch import ROOT, run_command


def test_the_recipe_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    text = (ROOT / "docs" / "21-convert.md").read_text()
    [code] = re.findall(r"## Logits of a converted checkpoint.*?```python\n(.*?)```", text, re.DOTALL)
    published.write(tmp_path / "source", "llama", published.draw("llama", random.Random(8)), seed=3)
    converted(tmp_path / "source", tmp_path / "checkpoints" / "llama", "torch_dist")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = run_command(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([[1, 5, 9, 2, 6, 5, 3, 5]])).logits
    found = torch.load(tmp_path / "logits.pt")
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert expected.std() > 0.1

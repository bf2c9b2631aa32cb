"""Layouts that ``plan --suggest`` offers for drawn models start: they are built, and take a step."""

from __future__ import annotations

import random

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.planning.hardware import DEVICES
from mt_megatron.planning.suggest import suggest
from tests.launch import run_ranks
from tests.planning.test_memory import SHAPE
from tests.second_lane import DAILY

WORLD = 4
DRAWN = 40 if DAILY else 4


def drawn(seed: int) -> list[str]:
    """Options of a small model with tied or predicting embeddings, and of one layout suggested for it."""
    draw = random.Random(seed)
    width = draw.choice((64, 96, 160))
    shape = SHAPE.format(width, draw.choice((72, 136, 200)), 4, draw.choice((120, 250, 500)), 32)
    model = f"{shape} --num-layers {draw.choice((2, 4))} --global-batch-size 8 --bf16"
    model += draw.choice((" --no-untie-embeddings-and-output-weights",) * 2 + ("",))
    model += draw.choice(("", " --add-qkv-bias", " --mtp-num-layers 1", " --normalization LayerNorm"))
    model += draw.choice(("", f" --bucket-size {draw.choice((500, 2000, 9000))}"))
    config = load_config(model.split())
    choices = suggest(config, WORLD, DEVICES["h100"]).choices
    # Where embeddings are shared and their gradients scattered, rather than any.
    wanted = [each for each in choices if each.layout.pipeline > 1 and each.layout.distributed_optimizer]
    layout = draw.choice(wanted or choices).layout
    return [*model.split(), *layout.options(config)]


@pytest.mark.parametrize("first", range(0, DRAWN, 4))
def test_drawn_suggestions_start(first: int) -> None:
    cases = [drawn(seed) for seed in range(first, first + 4)]
    for found in run_ranks(WORLD, "tests.planning.memory_ranks:measure", cases, timeout=240):
        for case, record in zip(cases, found, strict=True):
            assert record["held"] == record["predicted"], case

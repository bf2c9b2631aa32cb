"""A recording and a page of it, made once for the folder's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scope.synthetic import RunShape, Truth, write_run
from tests.scope.web.support import Served, served

SHAPE = RunShape(
    steps=60,
    interval=10,
    experts=4,
    tensor_every=20,
    token_every=20,
    attention_tokens=600,
    attention_layers=2,
    nan_at=50,
    perturbed=(30, 35),
)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    """A run with a recording, and what is true of it."""
    folder = tmp_path_factory.mktemp("page") / "run"
    truth = write_run(folder, SHAPE)
    write_run(folder.parent / "other", RunShape(steps=20, differs_from=11, tensor_every=0, token_every=0))
    return folder, truth


@pytest.fixture
def page(recorded: tuple[Path, Truth]) -> Iterator[Served]:
    """A page of a run whose ranks are there; of one test alone, since its rates are used up."""
    with served(recorded[0], live=True) as one:
        yield one

"""Two ranks over the fake of the verbs, connected both ways."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.comm.rdma.fake_ranks import BACK, FORTH, Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    """They are closed after the test."""
    made = Pair()
    assert made.prepare(FORTH, BACK) == [None, None]
    yield made
    made.close()

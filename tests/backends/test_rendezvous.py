"""Ranks that are started again meet each other and not what the attempt before left in the store."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from mt_megatron.backends.distributed import rendezvous
from mt_megatron.backends.distributed.rendezvous import elastic_group, fresh_name, loopback_store
from mt_megatron.errors import BackendError
from mt_megatron.parallel.rank_layout import _connecting
from tests.launch import run_ranks

SOON = timedelta(seconds=20)


def names(store: Any, world_size: int) -> list[str]:
    found: dict[int, str] = {}

    def rank(number: int) -> None:
        found[number] = fresh_name(store, number, world_size, SOON)

    # The others come after rank 0 has met what is stale.
    threads = [threading.Timer(0.1 * number, rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[number] for number in range(world_size)]


def test_every_attempt_has_a_name_of_its_own() -> None:
    store = HashStore()
    attempts = [names(store, 3) for _ in range(3)]
    assert all(len(set(attempt)) == 1 for attempt in attempts)
    assert len({attempt[0] for attempt in attempts}) == 3


def test_what_the_dead_asked_does_not_count_as_confirmed() -> None:
    store = HashStore()
    store.set("mt_megatron/attempt/word/1", "left by a dead rank")
    with pytest.raises(BackendError, match=r"ranks \[1\] did not come"):
        fresh_name(store, 0, 2, timedelta(seconds=0.3))
    assert len(set(names(store, 2))) == 1


def test_only_workers_that_use_torchruns_store_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert elastic_group(SOON) == {}


@pytest.mark.parametrize(
    "error",
    [
        dist.DistStoreError("wait timeout after 600000ms, keys: /0/1\nmore"),
        dist.DistNetworkError("The client socket has timed out"),
        RuntimeError("Gloo connectFullMesh failed with ... Connection closed by peer [127.0.0.1]:7900"),
    ],
)
def test_a_peer_that_ended_is_named_in_place_of_an_address(error: RuntimeError) -> None:
    with pytest.raises(BackendError, match="could not connect to the other ranks") as caught, _connecting():
        raise error
    assert str(error).splitlines()[0] in str(caught.value)
    with pytest.raises(RuntimeError, match="something else"), _connecting():
        raise RuntimeError("something else")


def test_a_second_default_group_does_not_find_the_addresses_of_the_first() -> None:
    """Without names of their own 2 of 2 trials ended with "Connection refused": the rank that is early reads
    the address which the other published for the group before."""
    assert run_ranks(2, "tests.patches.ranks:default_groups_one_after_another", 4) == [[2.0] * 4] * 2


def test_rank_0_counts_the_attempts_in_the_launchers_store(monkeypatch: pytest.MonkeyPatch) -> None:
    _store, port = loopback_store()
    environment = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_attempt", None)
    for number in (1, 2):
        elastic_group(SOON)
        found = rendezvous.attempt()
        assert found is not None and found.number == number

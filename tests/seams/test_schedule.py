"""run_schedule gives each chunk its iterator, runs what is installed, and defaults to Megatron's."""

from __future__ import annotations

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.seams import schedule as seam

SIZES = {"num_microbatches": 3, "seq_length": 4, "micro_batch_size": 2}


def test_installed_schedule_gets_one_iterator_per_chunk():
    calls = []

    def mine(forward_step, model_chunks, batches, **sizes):
        calls.append((list(model_chunks), list(batches), sizes))
        return [{"loss": 1}]

    chunk, batches = torch.nn.Identity(), iter([1, 2, 3])
    seam.set_schedule(mine)
    try:
        assert seam.run_schedule(None, [chunk], batches, **SIZES) == [{"loss": 1}]
        assert calls == [([chunk], [batches], {**SIZES, "forward_only": False})]
        with pytest.raises(ConfigError, match=r"1 batch iterator\(s\) for 2 model chunk"):
            seam.run_schedule(None, [chunk, chunk], batches, **SIZES)
    finally:
        seam.set_schedule(None)


def test_families_are_found_by_name():
    from mt_megatron.seams import family

    class Toy:
        pass

    toy = Toy()
    family.register("toy-of-this-test", toy)
    family.register("toy-of-this-test", toy)
    assert family.get("toy-of-this-test") is toy
    with pytest.raises(ConfigError, match="already registered"):
        family.register("toy-of-this-test", Toy())
    with pytest.raises(ConfigError, match="toy-of-this-test"):
        family.get("no-such-family")

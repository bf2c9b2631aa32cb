"""Dataset building in threads, Retro's blocks per rank, and downloads that one rank per host makes."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

from tests.coverage_gate.case import case
from tests.coverage_gate.target import torch


@case(world=1)
def blended_datasets_built_in_threads() -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.datasets.utils import compile_helpers

    assert callable(compile_helpers)
    with tempfile.TemporaryDirectory() as folder:
        prefixes = []
        for part in range(2):
            prefix = str(Path(folder) / f"part{part}")
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
            for document in range(8):
                builder.add_item(torch.arange(40).cpu() + 100 * part + document)
                builder.end_document()
            builder.finalize(f"{prefix}.idx")
            prefixes.append(prefix)
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=16,
            blend=(prefixes, [0.5, 0.5]),
            split="1,0,0",
            path_to_cache=str(Path(folder) / "cache"),
            num_dataset_builder_threads=2,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            tokenizer=SimpleNamespace(eod=0, unique_identifiers={"class": "test"}),
        )
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [12, 0, 0], lambda: True, config).build()
        assert len(train) >= 12
        sources = {int(train[index]["tokens"][0]) >= 100 for index in range(12)}
        assert sources == {False, True}, "both parts of the blend must appear"
        assert train[0]["tokens"].shape == (16,)


@case(world=2)
def retro_blocks_are_spread_over_ranks() -> None:
    """faiss and h5py are not needed to count missing blocks; upstream imports them all the same."""
    name = "megatron.core.datasets.retro.external_libs"
    stand_in = ModuleType(name)
    for library in ("faiss", "h5py", "transformers"):
        setattr(stand_in, library, None)
    sys.modules[name] = stand_in
    try:
        retro = importlib.import_module("megatron.core.datasets.retro.utils")
    finally:
        del sys.modules[name]
    with tempfile.TemporaryDirectory() as folder:
        blocks = retro.get_blocks_by_rank(folder, n_samples=50, block_size=10)
    assert blocks.n_missing_world == 5 and blocks.n_existing_world == 0
    mine = [block["range"] for block in blocks.missing if block is not None]
    expected = [[(0, 10), (20, 30), (40, 50)], [(10, 20), (30, 40)]][torch.distributed.get_rank()]
    assert mine == expected and len(blocks.missing) == 3, "all ranks get lists of one length"


@case(world=2)
def one_rank_of_a_host_downloads() -> None:
    """Against an S3 client in memory: there is no network here."""
    from megatron.core.datasets import utils_s3

    fetched: list[str] = []

    class Client:
        def download_file(self, bucket: str, key: str, local: str) -> None:
            fetched.append(f"{bucket}/{key}")
            Path(local).write_bytes(b"index")

    absent = object()
    before: Any = getattr(utils_s3, "boto3", absent)
    utils_s3.boto3 = SimpleNamespace(client=lambda service: Client())
    holder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(holder, src=0)
    local = Path(holder[0]) / "deep" / "a.idx"
    try:
        utils_s3.maybe_download_file("s3://bucket/path/a.idx", str(local))
        assert local.read_bytes() == b"index"
        assert fetched == (["bucket/path/a.idx"] if torch.distributed.get_rank() == 0 else [])
    finally:
        if before is absent:
            del utils_s3.boto3
        else:
            utils_s3.boto3 = before
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            local.unlink()
            local.parent.rmdir()
            local.parent.parent.rmdir()

"""What the ranks of this folder's tests run: models of every layout beside published weights."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mt_megatron
from mt_megatron.checkpoint.files import resolve_checkpoint
from mt_megatron.checkpoint.load import load_weights
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.save import save_checkpoint
from mt_megatron.config.parse import load_config
from mt_megatron.convert.rank_shards import parts
from mt_megatron.convert.settings import model_of
from mt_megatron.convert.tensors.table import to_megatron
from mt_megatron.errors import CheckpointError
from mt_megatron.models.families import family_of
from mt_megatron.models.tables.fused import local_name
from mt_megatron.training.distributed import joined
from mt_megatron.training.init_from_hf import init_from_hf
from mt_megatron.training.model import build
from tests.convert.published import read

_RUN = "--seq-length 16 --micro-batch-size 1 --mock-data --train-iters 1 --lr 1e-3 --hidden-dropout 0"


def everything(folder: str, cases: list[dict[str, Any]], wrong: dict[str, list[str]]) -> dict[str, Any]:
    """``every_layout``, and what a start from the folder ``llama`` says that cannot be, in one start."""
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    dist.init_process_group("gloo")
    return {
        "cases": every_layout(folder, cases),
        "refusals": refusals(folder, "llama", "llama.yaml", wrong),
        "one_rank": on_one_rank(folder, "llama", "llama.yaml"),
    }


def every_layout(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every case (a published folder, a converted one, options of a layout): what differs between the
    published weights and the model that starts from them, the model that loads the converted
    checkpoint, and the model's own checkpoint (left in ``saved`` for the caller to convert)."""
    return [_one(Path(folder), case) for case in cases]


def _one(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    source = folder / case["published"]
    config = load_config(
        [*_RUN.split(), *case["layout"], "--init-from-hf", str(source)], folder / case["config"]
    )
    model = model_of(config, tensor=config.parallel.tensor_model_parallel_size)
    whole = to_megatron(read(source), _table(config), model.sizes)
    found: dict[str, Any] = {}
    with joined(config, mt_megatron.backend()) as job:
        family = family_of(config)
        trainable = build(config, job, family)
        found["said"] = init_from_hf(config, trainable)
        found["started"] = _differing(trainable, whole)
        masters = _masters(trainable)
        found["masters"] = masters
        save_checkpoint(
            folder / case["saved"], trainable, Progress(), job, manifest={"config": config.to_dict()}
        )
        if "by_rank" in case:
            _as_megatron_lm_saves(folder / case["as_saved"], config, model, trainable)
            _spoil(trainable)
            _as_megatron_lm_loads(folder / case["by_rank"], trainable)
            found["by_rank"] = _differing(trainable, whole)
        _spoil(trainable)
        found["spoiled"] = len(_differing(trainable, whole))
        load_weights(resolve_checkpoint(folder / case["converted"]), trainable)
        found["loaded"] = _differing(trainable, whole)
    return found


def _rank_folder(folder: Path) -> Path:
    """``mp_rank_*`` of this rank, by Megatron-LM's rule."""
    from megatron.core import parallel_state as mpu

    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return folder / name


def _as_megatron_lm_saves(folder: Path, config: Any, model: Any, trainable: Any) -> None:
    from mt_megatron.convert.rank_files.arguments import arguments_of

    path = _rank_folder(folder)
    if dist.get_rank() == 0 or not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    layout = config.model.pipeline_model_parallel_layout
    args = arguments_of(config, model.sizes.padded_vocab_size, 3, list(layout) if layout else None)
    chunks = trainable.bare_chunks()
    state = {"args": args, "iteration": 3, "checkpoint_version": 3.0}
    for index, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{index}"] = chunk.state_dict_for_save_checkpoint()
    torch.save(state, path / "model_optim_rng.pt")
    dist.barrier()


def _as_megatron_lm_loads(folder: Path, trainable: Any) -> None:
    # Its own loading is unsafe; only the strictness matters here.
    state = torch.load(_rank_folder(resolve_by_pointer(folder)) / "model_optim_rng.pt", weights_only=False)
    chunks = trainable.bare_chunks()
    for index, chunk in enumerate(chunks):
        found = state["model" if len(chunks) == 1 else f"model{index}"]
        # Empty extra states included: some modules take none, loaded by themselves.
        unknown = set(found) - set(chunk.state_dict())
        assert not unknown, sorted(unknown)[:5]
        chunk.load_state_dict(found, strict=True)


def resolve_by_pointer(folder: Path) -> Path:
    """The folder that Megatron-LM's pointer names."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    return folder / f"iter_{iteration:07d}"


def refusals(folder: str, published: str, config: str, cases: dict[str, list[str]]) -> dict[str, str]:
    """What a start from a published folder says for every list of options; all ranks must say it."""
    found = {}
    for name, options in cases.items():
        settings = load_config(
            [*_RUN.split(), "--init-from-hf", f"{folder}/{published}", *options], Path(folder) / config
        )
        with joined(settings, mt_megatron.backend()) as job:
            trainable = build(settings, job, family_of(settings))
            try:
                init_from_hf(settings, trainable)
                found[name] = ""
            except CheckpointError as error:
                found[name] = str(error)
    return found


def on_one_rank(folder: str, published: str, config: str) -> str:
    """A file that rank 1 alone cannot read ends the start on both."""
    place = f"{folder}/{published}" if dist.get_rank() == 0 else tempfile.mkdtemp()
    settings = load_config([*_RUN.split(), "--init-from-hf", place], Path(folder) / config)
    with joined(settings, mt_megatron.backend()) as job:
        trainable = build(settings, job, family_of(settings))
        try:
            init_from_hf(settings, trainable)
        except CheckpointError as error:
            return str(error)
    return ""


def _table(config: Any) -> Any:
    return family_of(config).convert_table(config)


def _differing(trainable: Any, whole: dict[str, torch.Tensor]) -> list[str]:
    """Names of the parts on any rank that are not the published weights'."""
    mine = []
    for part in parts(trainable.bare_chunks()):
        expected = whole[local_name(part.name)][part.region].to(part.tensor.dtype)
        if not torch.equal(part.tensor, expected):
            mine.append(part.name)
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return sorted({name for names in everyone for name in names})


def _masters(trainable: Any) -> int:
    """How many fp32 master weights are not what the model's bf16 ones are."""
    wrong = 0
    for part in getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer]):
        groups = zip(
            getattr(part, "float16_groups", []),
            getattr(part, "fp32_from_float16_groups", []),
            strict=True,
        )
        for models, masters in groups:
            wrong += sum(not torch.equal(m.detach().float(), k) for m, k in zip(models, masters, strict=True))
    return wrong


def _spoil(trainable: Any) -> None:
    with torch.no_grad():
        for part in parts(trainable.bare_chunks()):
            part.tensor.fill_(7)

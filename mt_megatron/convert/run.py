"""One conversion from its request to the folder that it leaves: open, compare, plan, write, publish."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.checkpoint.files import (
    LATEST,
    MANIFEST,
    damaged_files,
    folder_name,
    read_manifest,
    write_durably,
)
from mt_megatron.checkpoint.retention import in_use
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.convert.folders import (
    METADATA,
    belongs,
    check_destination,
    finished,
    holds_nothing,
    megatron_folder,
    not_empty,
)
from mt_megatron.convert.hf.side_files import has_tokenizer
from mt_megatron.convert.hf.weights import PublishedSource
from mt_megatron.convert.inputs import Input, open_megatron, open_published
from mt_megatron.convert.optimizer_state import Carried, carry
from mt_megatron.convert.output_files import (
    distributed_files,
    files_by_rank,
    iteration_of,
    published_files,
    side_files_of,
    write_our_manifest,
)
from mt_megatron.convert.output_folder import OutputFolder
from mt_megatron.convert.rank_files.reader import rank_files
from mt_megatron.convert.request import DTYPES, Outcome, Progress, Request
from mt_megatron.convert.settings import Model, as_yaml, configuration, model_of
from mt_megatron.convert.tensors.sources import MegatronSource, Source
from mt_megatron.errors import CheckpointError, ConfigError
from mt_megatron.fp8.checkpoint import saved_recipe


def convert(request: Request, progress: Progress) -> Outcome:
    """Convert ``request.source``. Raises ``CheckpointError`` and ``ConfigError``; the destination is then as
    it was, and what was written waits beside it for the next try."""
    started = time.monotonic()
    if request.fp8 and request.form != "huggingface":
        raise ConfigError("FP8 weights are a published form; expected --to-hf with --fp8")
    check_destination(request.source, request.destination)
    if request.published:
        return _convert(request, progress, started)
    folder = megatron_folder(request.source)
    with read_safely(folder, verify=request.verify, workers=request.workers, say=progress.say):
        return _convert(dataclasses.replace(request, source=folder), progress, started)


def _convert(request: Request, progress: Progress, started: float) -> Outcome:
    target = None if request.dtype is None else DTYPES[request.dtype]
    given = _open(request, target)
    for note in given.notes:
        progress.say(note)
    if not request.weights_only:
        _require_optimizer(request, given)
    elif given.has_optimizer:
        how = given.flat_optimizer or (
            "only --to-megatron and --to-torch take --with-optimizer"
            if request.form == "huggingface"
            else "--with-optimizer converts it as well"
        )
        progress.say(f"the optimizer's state is left behind, the result holds weights only ({how})")
    config = configuration(given.options, request.arguments, published=request.published, say=progress.say)
    if not request.prediction:
        config = _without_prediction(config, progress)
    _say_recipe(request, given, progress)
    folder, contents = _final(request, given), _contents(request, given, config)
    there = finished(folder, contents)
    if there is None and not holds_nothing(request.destination):
        raise not_empty(request.destination)
    model = model_of(config, tensor=config.parallel.tensor_model_parallel_size)
    source: Source = _source(request, given, model, target)
    carried: Carried | None = None
    if not request.weights_only:
        assert given.optimizer is not None and isinstance(source, MegatronSource)
        distributed = config.parallel.use_distributed_optimizer
        if distributed and request.form == "torch":
            raise ConfigError(
                "rank files hold a distributed optimizer's state in flat buffers, which are not written; "
                "leave --use-distributed-optimizer out"
            )
        carried, model, source = carry(given.optimizer, config, model, source, distributed=distributed)
    if there is not None:
        progress.say(f"{folder} already holds the result of this command")
        # A run may have gone on in this folder since, and the name of its newest checkpoint stays.
        if not (request.destination / LATEST).exists():
            _name_newest(request, given)
        return Outcome(folder=folder, tensors=len(model.rows), bytes=sum(there.values()), seconds=0.0)
    with OutputFolder(folder, contents, progress.say) as output:
        if not output.is_whole:
            _write(request, given, config, model, source, carried, output, progress)
        output.publish()
    _name_newest(request, given)
    return Outcome(
        folder=folder,
        tensors=len(model.rows),
        bytes=sum(entry["bytes"] for entry in output.entries.values()),
        seconds=time.monotonic() - started,
    )


def _write(
    request: Request,
    given: Input,
    config: TrainingConfig,
    model: Model,
    source: Source,
    carried: Carried | None,
    output: OutputFolder,
    progress: Progress,
) -> None:
    if request.form == "huggingface":
        if not has_tokenizer(side_files_of(request, given)):
            progress.say(
                "the result has no tokenizer, since the source carries none: --hf-files names a folder "
                "that has one"
            )
        tasks = published_files(request, given, model, source, progress.say)
    elif request.form == "torch_dist":
        tasks = distributed_files(request, given, config, model, source, carried)
    else:
        tasks = files_by_rank(given, config, model, source, output.folder, carried)
    progress.expect(sum(task.size for task in tasks))
    output.write(tasks, request.workers, progress.advance)
    if request.form == "torch_dist":
        write_our_manifest(output, given, config, model, carried)


def configuration_file(source: Path, *, prediction: bool = True) -> str:
    """Our YAML for the model in the published folder ``source``. Raises ``CheckpointError``."""
    return as_yaml(open_published(source, prediction=prediction).options)


def _open(request: Request, target: torch.dtype | None) -> Input:
    if not request.published:
        return open_megatron(request.source)
    # Repeated tensors are compared when they are converted.
    return open_published(
        request.source, prediction=request.prediction, fp8_as=target or torch.bfloat16, copies=False
    )


def _say_recipe(request: Request, given: Input, progress: Progress) -> None:
    """One line where weights are cast otherwise than their run cast them."""
    if request.fp8_recipe is None or request.published:
        return
    trained = saved_recipe(given.options)
    if trained == request.fp8_recipe:
        return
    how = "in bf16, without fp8_recipe" if trained is None else f"with fp8_recipe {trained}"
    progress.say(
        f"--fp8 {request.fp8_recipe}: the run trained {how}, so the weights become codes and scales that it "
        "never computed with"
    )


def _without_prediction(config: TrainingConfig, progress: Progress) -> TrainingConfig:
    if config.model.mtp_num_layers:
        progress.say(f"{config.model.mtp_num_layers} layers of multi-token prediction are left out")
    core = dataclasses.replace(config.model.core, values={**config.model.core.values, "mtp_num_layers": None})
    return dataclasses.replace(config, model=dataclasses.replace(config.model, core=core))


def _source(
    request: Request, given: Input, model: Model, target: torch.dtype | None
) -> PublishedSource | MegatronSource:
    common: dict[str, Any] = {"rows": model.rows, "sizes": model.sizes, "target": target}
    if given.published is not None:
        return PublishedSource(folder=given.published, **common)
    assert given.checkpoint is not None
    keeps = request.form != "huggingface"
    checkpoint = MegatronSource(checkpoint=given.checkpoint, keeps_padding=keeps, **common)
    behind = set()
    if not request.prediction:
        behind = {name for name in given.checkpoint.tensors if name.startswith("mtp.")}
    checkpoint.check(model.config.model, behind)
    return checkpoint


def _require_optimizer(request: Request, given: Input) -> None:
    if request.form == "huggingface":
        raise ConfigError(
            "a published folder has no optimizer's state; expected --to-megatron or --to-torch with "
            "--with-optimizer"
        )
    if request.dtype is not None:
        raise ConfigError("an optimizer's state goes with the weights as they are; leave --dtype out")
    if given.optimizer is None:
        why = given.flat_optimizer or "it holds none"
        raise CheckpointError(
            f"{given.path} has no optimizer's state that can be converted: {why}. Leave --with-optimizer out "
            "to take the weights alone"
        )


def _name_newest(request: Request, given: Input) -> None:
    if request.form != "huggingface":
        write_durably(request.destination / LATEST, f"{iteration_of(given)}\n")


def _final(request: Request, given: Input) -> Path:
    if request.form == "huggingface":
        return request.destination
    return request.destination / folder_name(iteration_of(given))


def _contents(request: Request, given: Input, config: TrainingConfig) -> str:
    """What the result is made of, to the last option: only the same work is taken up again."""
    files: Sequence[Path] = sorted(
        each for each in given.path.rglob("*") if each.is_file() and not belongs(each, request.destination)
    )
    stats = [
        [str(each.relative_to(given.path)), each.stat().st_size, each.stat().st_mtime_ns] for each in files
    ]
    options = {
        field.name: str(getattr(request, field.name))
        for field in dataclasses.fields(request)
        if field.name not in ("workers", "verify")
    }
    # They may lie outside of the source: an edit of them changes no size or time above.
    beside = {} if request.form == "torch" else side_files_of(request, given)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in beside.items()}
    end = None if given.end is None else given.end.to_dict()
    return json.dumps(
        [mt_megatron.__version__, torch.__version__, stats, options, config.to_dict(), digests, end],
        sort_keys=True,
    )


# Checks of a Megatron checkpoint before a conversion signs it with checksums of its own. A distributed
# checkpoint of the trainer has a manifest with the checksum of every file. Rank files are zip archives with a
# checksum of every member. Other checkpoints have none, and a message says so.

_CHUNK = 4 << 20

Say = Callable[[str], None]


@contextmanager
def read_safely(folder: Path, *, verify: bool, workers: int, say: Say) -> Iterator[None]:
    """Around the reading of the checkpoint ``folder``: it is not pruned meanwhile, and with ``verify`` it is
    compared with its checksums first. Raises ``CheckpointError`` that names every damaged file."""
    if not (folder / MANIFEST).is_file():
        # Of another program, which holds no lock and prunes nothing of ours.
        if verify:
            _verify(folder, workers, say)
        yield
        return
    with in_use(folder, say):
        if verify:
            _verify(folder, workers, say)
        yield


def _verify(folder: Path, workers: int, say: Say) -> None:
    found: list[str] | None
    if (folder / METADATA).is_file() or (folder / MANIFEST).is_file():
        found = _by_manifest(folder, workers)
    else:
        found = _by_archive(rank_files(folder), workers)
    if found is None:
        say(f"{folder} has no checksums: its files are taken as they are")
    elif found:
        raise CheckpointError(
            f"{folder} is damaged and was not converted:\n"
            + "\n".join(f"- {line}" for line in found)
            + "\nGive another checkpoint, or --no-verify-checkpoint to convert it all the same"
        )


def _by_manifest(folder: Path, workers: int) -> list[str] | None:
    if not (folder / MANIFEST).is_file():
        return None
    document = read_manifest(folder)
    if "files" not in document:
        return None
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:
        shares = pool.map(
            lambda reader: damaged_files(folder, document, reader=reader, readers=workers), range(workers)
        )
        return [line for lines in shares for line in lines]


def _by_archive(paths: list[Path], workers: int) -> list[str] | None:
    archives = [path for path in paths if _has_checksums(path)]
    if not archives:
        return None
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:
        return [line for line in pool.map(_damage_of_archive, archives) if line is not None]


def _has_checksums(path: Path) -> bool:
    """False for an archive that torch wrote without them (``set_crc32_options(False)``), which has zeros."""
    if not zipfile.is_zipfile(path):
        return _begins_as_zip(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError):
        return True
    return not members or any(member.CRC for member in members)


def _begins_as_zip(path: Path) -> bool:
    with open(path, "rb") as stream:
        return stream.read(2) == b"PK"


def _damage_of_archive(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    # zipfile compares the checksum when it comes to the member's end.
                    while stream.read(_CHUNK):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        return f"{path} is damaged: {error}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None

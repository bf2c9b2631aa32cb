"""Whether the training data lasts as long as the run, known before its first step."""

from __future__ import annotations

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.config.rampup import BatchSizes
from mt_megatron.config.schema import DataConfig
from mt_megatron.errors import DataError


def require_samples(
    found: int, progress: Progress, train_iters: int, sizes: BatchSizes, data: DataConfig
) -> None:
    """Raise ``DataError`` when ``found`` training samples do not last from ``progress`` to
    ``train_iters``."""
    consumed, step = progress.consumed_samples, progress.iteration
    last: int | None = None
    while step < train_iters:
        size = sizes.at(consumed)
        if last is None and consumed + size > found:
            last = step
        if size == sizes.final and last is not None:
            consumed += (train_iters - step) * size
            break
        consumed, step = consumed + size, step + 1
    if last is None:
        return
    fixes = [f"--train-iters {last}"] if last > progress.iteration else []
    why = ""
    paths = data.train_data_path or data.data_path
    built = int(sizes.samples_after(train_iters))
    if len(paths) > 1 and not _is_weight(paths[0]):
        why = f" Prefixes without weights are read once from end to end, and hold {found:,} samples together."
        flag = "--train-data-path" if data.train_data_path else "--data-path"
        weighted = " ".join(f"{1 / len(paths):.2g} {each}" for each in paths)
        fixes.append(f"weights, with which they are read again as often as it takes ({flag} {weighted})")
    elif consumed > built:
        why = (
            f" The data is made for {built:,} samples ({train_iters:,} steps with this run's batch size), "
            f"and the checkpoint of step {progress.iteration:,} had consumed "
            f"{progress.consumed_samples:,} with another one."
        )
        fixes.append("--global-batch-size as it was")
    else:
        fixes.append("more data")
    raise DataError(
        f"found {found:,} training samples; expected {consumed:,}, which steps {progress.iteration + 1:,} to "
        f"{train_iters:,} come to: the data would be used up after step {last:,}.{why} Change it to "
        f"{', or to '.join(fixes)}"
    )


def _is_weight(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

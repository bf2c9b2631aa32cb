"""The end of a run: its outcome, its validation loss beside that of n-grams, commands to go on with."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.checkpoint.progress import Progress
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.data.loader.datasets import SampleDataset
from mt_megatron.data.prepare.ngram import Baselines, NgramModel, dataset_baselines
from mt_megatron.parallel.rank_layout import RankLayout
from mt_megatron.training.evaluate import Validation
from mt_megatron.training.logging.metrics import perplexity
from mt_megatron.training.logging.quantities import duration


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    progress: Progress
    finished: bool
    """Whether all of ``train_iters`` are done."""

    loss: float | None
    """Training loss of the last step of this run; None when it made none."""

    validation: Validation | None
    """The last validation; None when there was none."""

    checkpoint: Path | None
    """The newest checkpoint; None when none is written."""

    straggler: bool = False
    """Whether the run ended because a straggler was confirmed; its host is on the list of excluded ones."""


_PUBLISHED = ("llama", "mixtral", "deepseek", "qwen")
"""Families that ``mt-megatron convert --to-hf`` knows."""


def next_lines(
    config: TrainingConfig,
    iteration: int,
    checkpoint: Path | None,
    trace: Path | None,
    recorded: Path | None = None,
) -> list[str]:
    """Where the ``trace`` lies, and one line per possibility, each beginning with ``next:``. ``recorded``:
    the run's folder where MegaScope recorded something."""
    lines = [] if trace is None else [f"trace: {trace}"]
    save = config.checkpoint.save
    if checkpoint is not None and save is not None:
        total = config.train.train_iters
        # Any other --resume than auto does at the next start what it did at this one.
        automatic = config.checkpoint.resume == "auto"
        if total is not None and iteration < total:
            how = "" if automatic else " with --resume auto"
            lines.append(f"next: the same command{how} goes on from step {iteration}")
        else:
            how = "" if automatic else "--resume auto and "
            lines.append(f"next: the same command with {how}a larger --train-iters trains on")
        if config.model.family in _PUBLISHED:
            # A run without a step of its own has nothing in --save: its checkpoint is the one it began from.
            folder = shlex.quote(str(save if checkpoint.parent == Path(save) else checkpoint))
            lines.append(
                f"next: mt-megatron convert --from-megatron {folder} --to-hf FOLDER  (for transformers, vLLM)"
            )
    if trace is not None:
        lines.append(f"next: mt-megatron scan report {shlex.quote(str(trace))}  (what held the run up)")
    if recorded is not None:
        run = shlex.quote(str(recorded))
        lines.append(f"next: mt-megatron scope open {run}  (losses, layers and tensors in a browser)")
        lines.append(f"next: mt-megatron scope report {run}  (the same as one HTML file)")
    return lines


def summary_lines(
    *,
    progress: Progress,
    train_iters: int,
    train_loss: float | None,
    validation: Validation | None,
    baselines: Baselines | None,
    checkpoint: Path | None,
    save: str | None,
    seconds: float,
) -> list[str]:
    """What a person wants to know when a run has ended; ``save`` is its ``--save``, ``seconds`` how long this
    process took."""
    lines = []
    if progress.iteration > train_iters:
        lines.append(
            f"nothing to train: the run is at step {progress.iteration}, beyond --train-iters {train_iters}"
        )
    lines += [
        f"done: {progress.iteration} of {train_iters} steps, {progress.consumed_tokens:,} tokens, "
        f"{progress.skipped_iterations} skipped, {duration(seconds)} of wall time"
    ]
    if train_loss is not None:
        lines.append(f"training loss of the last step {train_loss:.4f} nats per token")
    if validation is not None:
        lines.append(
            f"validation cross-entropy {validation.loss:.4f} nats per token, perplexity "
            f"{perplexity(validation.loss):.2f}, over {validation.tokens:,} tokens"
        )
    if validation is not None and baselines is not None:
        better = validation.loss < baselines.bigram
        lines.append(
            f"on the same tokens: training unigrams {baselines.unigram:.4f}, interpolated training bigrams "
            f"{baselines.bigram:.4f}; this model is {'below' if better else 'not below'} the bigrams"
            + ("" if better else ": it predicts worse than a table of token pairs, train longer")
        )
    lines.append(
        f"checkpoint: {checkpoint}"
        if checkpoint is not None
        else f"checkpoint: none (no save in {save} succeeded, see above)"
        if save is not None
        else "checkpoint: none (no --save)"
    )
    config = None if checkpoint is None else checkpoint / "config.yaml"
    if config is not None and config.is_file():
        lines.append(f"config: {config}")
    return lines


def layout_text(layout: RankLayout) -> str:
    """How many processes there are and how they share the work."""
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    chunks = f" x {layout.vpp} chunks" if layout.interleaved else ""
    context = f"context {layout.cp}, " if layout.cp > 1 else ""
    return f"{processes}: tensor {layout.tp}, pipeline {layout.pp}{chunks}, {context}data {layout.dp}"


def corpus_baselines(
    config: TrainingConfig, valid: SampleDataset | None, *, vocab_size: int, max_samples: int
) -> Baselines | None:
    """Unigrams and bigrams of the training tokens, scored on the positions that validation scores.

    None when the training data is not one prepared corpus (a prefix with ``corpus.json`` beside
    it): counting the n-grams of an arbitrary blend could take longer than the run.
    """
    prefixes = config.data.train_data_path
    if valid is None or len(prefixes) != 1 or not (Path(prefixes[0]).parent / "corpus.json").exists():
        return None
    return dataset_baselines(NgramModel.of_prefixes(prefixes, vocab_size), valid, max_samples)

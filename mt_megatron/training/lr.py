"""Learning rate and weight decay over a run, by Megatron-Core's ``OptimizerParamScheduler``."""

from __future__ import annotations

from typing import Any

from mt_megatron.config.rampup import batch_sizes
from mt_megatron.config.schema import TrainConfig, TrainingConfig
from mt_megatron.errors import ConfigError


def build_scheduler(config: TrainingConfig, optimizer: Any, global_batch_size: int) -> Any:
    """The scheduler for ``optimizer``. It counts samples, as Megatron-LM's does, so that its state
    means the same after the batch size changes; options in steps mean the samples of so many steps,
    the smaller ones of a ramp-up included. ``global_batch_size`` is the one after the ramp.

    Raises ``ConfigError`` when values are missing.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    train, options = config.train, config.optimizer
    if options.lr is None or train.train_iters is None:
        missing = [
            name
            for name, value in (("--lr", options.lr), ("--train-iters", train.train_iters))
            if value is None
        ]
        raise ConfigError(
            f"{' and '.join(missing)} not set; a run needs a learning rate and a number of steps"
        )
    decay_iters = train.lr_decay_iters or train.train_iters
    warmup_iters = warmup_steps(train, decay_iters)
    if not warmup_iters < decay_iters:
        raise ConfigError(
            f"warm-up takes {warmup_iters:g} steps of {decay_iters}; expected fewer than lr_decay_iters: "
            "shorten the warm-up or train longer"
        )
    wsd_iters = train.lr_wsd_decay_iters
    samples = batch_sizes(train.rampup_batch_size, global_batch_size).samples_after
    wsd = None if wsd_iters is None else samples(decay_iters) - samples(decay_iters - wsd_iters)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=train.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=samples(warmup_iters),
        lr_decay_steps=samples(decay_iters),
        lr_decay_style=train.lr_decay_style,
        start_wd=_or(train.start_weight_decay, options.weight_decay),
        end_wd=_or(train.end_weight_decay, options.weight_decay),
        wd_incr_steps=samples(train.train_iters),
        wd_incr_style=train.weight_decay_incr_style,
        # A resumed run follows its configuration; what differs from the checkpoint is logged.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=wsd,
        lr_wsd_decay_style=train.lr_wsd_decay_style,
    )


def warmup_steps(train: TrainConfig, decay_iters: float) -> float:
    """Steps of warm-up: as given, as a share of ``decay_iters``, or a hundredth of them up to 2,000."""
    if train.lr_warmup_fraction is not None:
        return train.lr_warmup_fraction * decay_iters
    if train.lr_warmup_iters is not None:
        return float(train.lr_warmup_iters)
    return float(min(decay_iters // 100, 2000))


def learning_rate(optimizer: Any) -> float:
    """The current learning rate of the first parameter group without a multiplier of its own."""
    for group in optimizer.param_groups:
        if group.get("lr_mult", 1.0) == 1.0 and not group.get("is_decoupled_lr", False):
            return float(group["lr"])
    return float(optimizer.param_groups[0]["lr"])


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

"""Checks of batches, steps, schedule, optimizer and precision."""

from __future__ import annotations

from mt_megatron.config.schema import TrainingConfig


def train_problems(config: TrainingConfig) -> list[str]:
    """One line per problem: found, expected, what to change."""
    checks = (_counts, _learning_rate, _weight_decay, _precision, _loss_scale, _divergence)
    return [problem for check in checks for problem in check(config)]


def _counts(config: TrainingConfig) -> list[str]:
    train, found = config.train, []
    for name, value in (("seq_length", train.seq_length), ("train_iters", train.train_iters)):
        if value is None:
            found.append(f"{name} is not set; expected at least 1. Set --{name.replace('_', '-')}.")
    positive = {
        "seq_length": train.seq_length,
        "train_iters": train.train_iters,
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": train.global_batch_size,
        "eval_interval": train.eval_interval,
        "exit_interval": train.exit_interval,
        "lr_decay_iters": train.lr_decay_iters,
        "lr_wsd_decay_iters": train.lr_wsd_decay_iters,
        "save_interval": config.checkpoint.save_interval,
        "log_interval": config.logging.log_interval,
        "cpu_threads": config.launch.cpu_threads,
    }
    for name, count in positive.items():
        if count is not None and count < 1:
            found.append(f"{name} is {count}; expected at least 1. Set --{name.replace('_', '-')}.")
    not_negative = {
        "eval_iters": train.eval_iters,
        "lr_warmup_iters": train.lr_warmup_iters,
        "num_workers": config.data.num_workers,
        "seed": train.seed,
    }
    for name, count in not_negative.items():
        if count is not None and count < 0:
            found.append(f"{name} is {count}; expected at least 0. Set --{name.replace('_', '-')}.")
    for name, minutes in (
        ("exit_duration_in_mins", train.exit_duration_in_mins),
        ("distributed_timeout_minutes", config.launch.distributed_timeout_minutes),
    ):
        if minutes is not None and minutes <= 0:
            found.append(f"{name} is {minutes}; expected more than 0. Set --{name.replace('_', '-')}.")
    if config.launch.cpu_bf16_products == "fp32" and not train.bf16:
        found.append(
            "cpu_bf16_products is fp32 without bf16; expected bf16, whose products it is about. Set --bf16, "
            "or leave --cpu-bf16-products out."
        )
    minutes = config.checkpoint.save_interval_in_mins
    if minutes is not None and minutes < 0:
        found.append(
            f"save_interval_in_mins is {minutes}; expected more than 0, or 0 for never. "
            "Set --save-interval-in-mins."
        )
    return found


def _learning_rate(config: TrainingConfig) -> list[str]:
    train, optimizer, found = config.train, config.optimizer, []
    if optimizer.lr is None or optimizer.lr <= 0:
        found.append(f"lr is {optimizer.lr}; expected more than 0. Set --lr.")
    elif not 0 <= optimizer.min_lr <= optimizer.lr:
        found.append(f"min_lr is {optimizer.min_lr}; expected 0 to lr = {optimizer.lr}. Set --min-lr.")
    elif not 0 <= train.lr_warmup_init <= optimizer.lr:
        found.append(
            f"lr_warmup_init is {train.lr_warmup_init}; expected 0 to lr = {optimizer.lr}. "
            "Set --lr-warmup-init."
        )
    if optimizer.decoupled_min_lr is not None and optimizer.decoupled_lr is None:
        found.append("decoupled_min_lr is set without decoupled_lr; expected both. Set --decoupled-lr.")
    fraction = train.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        found.append(f"lr_warmup_fraction is {fraction}; expected 0 <= share < 1. Set --lr-warmup-fraction.")
    if fraction is not None and train.lr_warmup_iters:
        found.append(
            f"lr_warmup_fraction is {fraction} and lr_warmup_iters is {train.lr_warmup_iters}; expected "
            "one of the two. Leave --lr-warmup-fraction or --lr-warmup-iters out."
        )
    decay = train.lr_decay_iters or train.train_iters
    if decay is not None and train.lr_warmup_iters is not None and train.lr_warmup_iters >= decay > 0:
        found.append(
            f"lr_warmup_iters is {train.lr_warmup_iters}; expected less than the {decay} steps of the "
            "schedule. Change --lr-warmup-iters, --lr-decay-iters or --train-iters."
        )
    if train.lr_decay_style == "WSD" and train.lr_wsd_decay_iters is None:
        found.append("lr_wsd_decay_iters is not set; expected a number with WSD. Set --lr-wsd-decay-iters.")
    if train.lr_wsd_decay_iters is not None and train.lr_decay_style != "WSD":
        found.append(
            f"lr_wsd_decay_iters is set with lr_decay_style {train.lr_decay_style}; expected WSD, which "
            "alone has it. Set --lr-decay-style WSD, or leave --lr-wsd-decay-iters out."
        )
    if train.lr_wsd_decay_iters is not None and decay is not None and train.lr_wsd_decay_iters > decay:
        found.append(
            f"lr_wsd_decay_iters is {train.lr_wsd_decay_iters}; expected at most the {decay} steps of the "
            "schedule. Change --lr-wsd-decay-iters."
        )
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            found.append(f"{name} is {value}; expected 0 <= beta < 1. Set --{name.replace('_', '-')}.")
    if optimizer.adam_eps <= 0:
        found.append(f"adam_eps is {optimizer.adam_eps}; expected more than 0. Set --adam-eps.")
    if optimizer.clip_grad < 0:
        found.append(
            f"clip_grad is {optimizer.clip_grad}; expected at least 0, where 0 is off. Set --clip-grad."
        )
    if config.parallel.use_distributed_optimizer and optimizer.optimizer != "adam":
        found.append(
            f"optimizer is {optimizer.optimizer} with use_distributed_optimizer; expected adam. Set "
            "--optimizer adam or leave --use-distributed-optimizer out."
        )
    return found


def _weight_decay(config: TrainingConfig) -> list[str]:
    train, found = config.train, []
    ends = {"start_weight_decay": train.start_weight_decay, "end_weight_decay": train.end_weight_decay}
    for name, value in {"weight_decay": config.optimizer.weight_decay, **ends}.items():
        if value is not None and value < 0:
            found.append(f"{name} is {value}; expected at least 0. Set --{name.replace('_', '-')}.")
    constant = train.weight_decay_incr_style == "constant"
    for name, value in ends.items():
        if constant and value is not None:
            found.append(
                f"{name} is {value} with constant weight decay; expected none. Use --weight-decay, or set "
                "--weight-decay-incr-style."
            )
        if not constant and value is None:
            found.append(
                f"{name} is not set; expected a number with weight_decay_incr_style "
                f"{train.weight_decay_incr_style}. Set --{name.replace('_', '-')}."
            )
    start, end = ends.values()
    if not constant and start is not None and end is not None and start > end >= 0:
        found.append(
            f"start_weight_decay is {start}; expected at most end_weight_decay = {end}: Megatron-Core lets "
            "weight decay grow only. Change --start-weight-decay or --end-weight-decay."
        )
    return found


def _precision(config: TrainingConfig) -> list[str]:
    train, optimizer, found = config.train, config.optimizer, []
    if train.bf16 and train.fp16:
        found.append("bf16 and fp16 are both on; expected at most one. Add --no-bf16 or --no-fp16.")
    if optimizer.loss_scale is not None and not train.fp16:
        found.append(
            f"loss_scale is {optimizer.loss_scale} without fp16; expected none: only fp16 gradients are "
            "scaled. Leave --loss-scale out."
        )
    return found


def _loss_scale(config: TrainingConfig) -> list[str]:
    optimizer, found = config.optimizer, []
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        scale = getattr(optimizer, name)
        if scale is not None and scale <= 0:
            found.append(f"{name} is {scale}; expected more than 0. Set --{name.replace('_', '-')}.")
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        found.append(
            f"min_loss_scale is {optimizer.min_loss_scale}; expected at most initial_loss_scale = "
            f"{optimizer.initial_loss_scale}. Set --min-loss-scale or --initial-loss-scale."
        )
    for name in ("loss_scale_window", "hysteresis"):
        count = getattr(optimizer, name)
        if count < 1:
            found.append(f"{name} is {count}; expected at least 1. Set --{name.replace('_', '-')}.")
    return found


def _divergence(config: TrainingConfig) -> list[str]:
    train, found = config.train, []
    if train.max_divergences < 0:
        found.append(
            f"max_divergences is {train.max_divergences}; expected at least 0. Set --max-divergences."
        )
    if train.loss_spike_factor is not None and train.loss_spike_factor <= 1:
        found.append(
            f"loss_spike_factor is {train.loss_spike_factor}; expected more than 1: every loss is near its "
            "own mean. Set --loss-spike-factor."
        )
    if train.grad_norm_threshold is not None and train.grad_norm_threshold <= 0:
        found.append(
            f"grad_norm_threshold is {train.grad_norm_threshold}; expected more than 0. Set "
            "--grad-norm-threshold."
        )
    if train.on_divergence == "rollback" and config.checkpoint.save is None:
        found.append(
            "on_divergence is rollback and save is not set; expected a directory with checkpoints to go back "
            "to. Set --save, and --save-interval for how far back."
        )
    if config.launch.watchdog_seconds < 0:
        found.append(
            f"watchdog_seconds is {config.launch.watchdog_seconds}; expected at least 0, where 0 is off. Set "
            "--watchdog-seconds."
        )
    return found

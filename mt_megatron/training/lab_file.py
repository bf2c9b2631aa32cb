"""Checks of ``--scope-lab`` before a run starts."""

from __future__ import annotations

import os

from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError


def lab_problems(config: TrainingConfig, world_size: int, *, must_exist: bool = True) -> list[str]:
    """Mistakes in the file of perturbations that can be told without the model. Unless it ``must_exist``,
    nothing is said of one that cannot be read here: the job's machines may have it."""
    path = config.scope.scope_lab
    if path is None or config.scope.scope == "off" or not (must_exist or os.access(path, os.R_OK)):
        return []
    # Not earlier: a run without one need not load it.
    from mt_megatron.scope.lab.specification import read_lab_file

    try:
        given = read_lab_file(path)
    except ConfigError as error:
        return [str(error)]
    found = []
    iterations = config.train.train_iters
    for one in given.perturbations:
        if one.ranks is not None and max(one.ranks) >= world_size:
            found.append(
                f"--scope-lab: {path}: {one.name} has rank {max(one.ranks)}; expected 0 to {world_size - 1}"
            )
        if iterations is not None and one.steps.first is not None and one.steps.first > iterations:
            found.append(
                f"--scope-lab: {path}: {one.name} has steps {one.steps.text()}; expected a first of at most "
                f"{iterations}, the run's last"
            )
        layers = config.model.num_layers
        if one.layers is not None and max(one.layers) >= layers:
            found.append(
                f"--scope-lab: {path}: {one.name} has layer {max(one.layers)}; expected 0 to {layers - 1}"
            )
    return found

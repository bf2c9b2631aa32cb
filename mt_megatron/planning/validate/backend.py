"""Whether the backend that a configuration names is installed; imports neither torch nor the backend."""

from __future__ import annotations

from mt_megatron.backends.registry import check_name
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import BackendError


def backend_problems(config: TrainingConfig) -> list[str]:
    """A line when no backend has that name; whether its device is here is seen when torch is imported."""
    try:
        check_name(config.launch.backend)
    except BackendError as error:
        return [f"--backend: {error}"]
    return []

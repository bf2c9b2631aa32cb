"""A weighted blend takes no sample that a dataset does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mt_megatron.backends.base import Backend
from mt_megatron.patching.spec import Patch


def _init(
    original: Callable[..., None], self: Any, datasets: Any, weights: Any, size: Any, config: Any
) -> None:
    """Upstream makes the blend longer than what was asked for, by as much as each dataset is rounded up: the
    end may take more of a dataset than it has. The blend ends before."""
    original(self, datasets, weights, size, config)
    if size is None:
        return
    import numpy

    lengths = numpy.array([len(dataset) for dataset in datasets])
    # Upstream draws from the dataset that is furthest behind its weight: none gets more than one ahead of it.
    if (numpy.array(self.weights) * size + 1 <= lengths).all():
        return
    missing = self.dataset_sample_index >= lengths[self.dataset_index]
    if missing.any():
        self.size = int(missing.argmax())
        self.dataset_index = self.dataset_index[: self.size]
        self.dataset_sample_index = self.dataset_sample_index[: self.size]


def _build(self: Any) -> Any:
    """Without upstream's check, which compares other datasets' counts where one has no sample in a blend."""
    return self._build_blended_dataset_splits()


def patches(backend: Backend) -> list[Patch]:
    return [
        Patch(
            id="errata.blend_excess",
            target="megatron.core.datasets.blended_dataset:BlendedDataset.__init__",
            kind="wrap",
            feature="errata",
            reason="a weighted blend asks a dataset for samples beyond its end (NVIDIA/Megatron-LM !2593)",
            body=_init,
            digest="609c9b5b6227553bf5bfa53513189caff09e313f84f18f6c1d15eb6cec0c4646",
        ),
        Patch(
            id="errata.blend_check",
            target="megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.build",
            kind="replace",
            feature="errata",
            reason="a blend in which one dataset has no sample is refused as one that oversamples another "
            "(NVIDIA/Megatron-LM !2663)",
            body=_build,
            digest="f020cd32b81453a570af59c98986fa5235012626694198a5c4b7aeba69e2996f",
        ),
    ]

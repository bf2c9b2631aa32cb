"""Unsteadiness: lognormal everywhere, rare heavy-tailed delays, and what lasts for a while."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Noise:
    """Draws from generators of its own per purpose, so that a fault does not change the other draws."""

    def __init__(self, seed: int, *, probability: float, scale: float, exponent: float) -> None:
        """Delays come with ``probability`` and are ``scale`` (ns) times a Pareto variable of ``exponent``."""
        self._seed = seed
        self._generators: dict[str, np.random.Generator] = {}
        self._probability = probability
        self._scale = scale
        self._exponent = exponent

    def generator(self, purpose: str) -> np.random.Generator:
        """The one of ``purpose``."""
        if purpose not in self._generators:
            words = [self._seed, *purpose.encode()]
            self._generators[purpose] = np.random.default_rng(np.random.SeedSequence(words))
        return self._generators[purpose]

    def factors(self, purpose: str, shape: Sequence[int], sigma: float) -> Floats:
        """Lognormal with median 1."""
        drawn = self.generator(purpose).standard_normal(tuple(shape), dtype=np.float32)
        return np.exp(np.multiply(drawn, sigma, dtype=np.float64))

    def delays(self, purpose: str, shape: Sequence[int]) -> Floats:
        """Nanoseconds, nearly all 0."""
        generator = self.generator(f"{purpose} delays")
        size = int(np.prod(tuple(shape)))
        made = np.zeros(size)
        count = int(generator.poisson(size * self._probability))
        if count and size:
            where = generator.integers(0, size, count)
            np.add.at(made, where, self._scale * (1 + generator.pareto(self._exponent, count)))
        return made.reshape(tuple(shape))


class Lasting:
    """A factor per element that wanders around 1 and is like itself for a few steps."""

    def __init__(
        self, noise: Noise, purpose: str, shape: Sequence[int], sigma: float, memory: float = 0.8
    ) -> None:
        self._noise = noise
        self._purpose = purpose
        self._sigma = sigma
        self._memory = memory
        self._now = np.log(noise.factors(purpose, shape, sigma))

    def next(self) -> Floats:
        """The factors of the next step."""
        drawn = np.log(self._noise.factors(self._purpose, self._now.shape, self._sigma))
        self._now = self._memory * self._now + np.sqrt(1 - self._memory**2) * drawn
        return np.exp(self._now)

"""Features whose patches are in force, as layers and configurations ask."""

from __future__ import annotations

_chosen: frozenset[str] | None = None


def choose(features: frozenset[str] | None) -> None:
    """Features of the plan that is in force from now on; None: all."""
    global _chosen
    _chosen = features


def is_in_force(feature: str) -> bool:
    """True when the plan in force has the patches of ``feature``."""
    return _chosen is None or feature in _chosen

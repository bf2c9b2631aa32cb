"""The way of a token through the pipeline's ranks: Megatron-Core's loop, or a V.

In a loop virtual stage s is chunk ``s // ranks`` of rank ``s % ranks``. In a V (two chunks) it goes back from
the last rank to the first, which so holds the embedding and the output layer. Megatron-Core knows the loop
alone; ``mt_megatron.patches.pipeline`` makes it follow what is chosen here before process groups are made.
"""

from __future__ import annotations

from mt_megatron.errors import ConfigError

_v = False


def use_v(on: bool) -> None:
    """Lay stages out as a V from the next process groups on, or as a loop again."""
    global _v
    _v = on


def is_v() -> bool:
    """True where stages are laid out as a V."""
    return _v


def virtual_stage(rank: int, chunk: int, ranks: int) -> int:
    """The number of ``chunk`` of pipeline rank ``rank`` in the order in which a token passes."""
    if _v and chunk == 1:
        return 2 * ranks - 1 - rank
    return chunk * ranks + rank


def last_rank(ranks: int) -> int:
    """The pipeline rank of the last virtual stage."""
    return 0 if _v else ranks - 1


def require_two_chunks(chunks: int | None) -> None:
    """Raise ConfigError for a V of another number of chunks per rank than two."""
    if _v and chunks != 2:
        raise ConfigError(
            f"found {chunks or 1} chunk(s) per rank with stages in a V; expected 2. Set "
            "--virtual-pipeline-model-parallel-size 2"
        )

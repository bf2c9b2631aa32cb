"""Which transformer layers each pipeline stage and chunk holds: the one place that divides layers.

Upstream divides evenly and leaves the remainder out. Here every layer is somewhere exactly once, or
there is an error before anything is built. Virtual stages are numbered as upstream does: ``chunk x
stages + stage``, which is also the order in which a token passes through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mt_megatron.errors import ConfigError

# Megatron-Core 0.13's text for a pipeline layout, read into layers per virtual stage. ``|`` ends a virtual
# stage, ``E`` is the embedding, ``t`` a transformer layer, ``m`` a multi-token prediction layer, ``L`` the
# output layer and the loss; ``x*n`` repeats one letter or a group in parentheses; commas mean nothing.
# ``Et*3|(tt|)*29,mL`` has 31 virtual stages: 3, 29 times 2, and none but ``m`` and ``L``.

_LETTERS = "EtmL"
_LONGEST = 100_000
_DEEPEST = 50


def counts_of_text(text: str, mtp_num_layers: int | None = None) -> list[int]:
    """Layers of each virtual stage that ``text`` describes. Numbers with commas, ``4,4,3``, are counts too.

    ``mtp_num_layers`` is how many ``m`` there have to be (None: any number); a text without ``m`` leaves them
    to the last virtual stage, which is where they have to be. Raises ``ConfigError`` for anything else than
    the grammar above, an embedding that is not first or an output layer that is not last.
    """
    if text.strip() == "balanced":
        raise ConfigError(
            "pipeline_model_parallel_layout is 'balanced', which is resolved before a TransformerConfig is "
            "made; expected numbers of layers here. Give them; mt_megatron.planning.cost.balanced_layout has "
            "them"
        )
    if text.strip() and all(part.strip().isdigit() for part in text.split(",")):
        return [int(part) for part in text.split(",")]
    stages = _expanded(text).split("|")
    letters = "".join(stages)
    if "E" in letters and (letters.count("E") > 1 or not stages[0].startswith("E")):
        raise _wrong(text, "the embedding E once, at the beginning of the first virtual stage")
    if "L" in letters and (letters.count("L") > 1 or not stages[-1].endswith("L")):
        raise _wrong(text, "the output layer L once, at the end of the last virtual stage")
    _check_mtp(text, stages, mtp_num_layers)
    return [stage.count("t") for stage in stages]


def _check_mtp(text: str, stages: list[str], mtp_num_layers: int | None) -> None:
    found = sum(stage.count("m") for stage in stages)
    if not found:
        return
    if mtp_num_layers is not None and found != mtp_num_layers:
        raise _wrong(text, f"mtp_num_layers = {mtp_num_layers} times m")
    if stages[-1].count("m") != found or "t" in stages[-1].split("m", 1)[1]:
        raise _wrong(text, "every m on the last virtual stage, after its layers")


def _expanded(text: str) -> str:
    """``text`` with its repetitions written out."""
    source = "".join(text.replace(",", "").split())
    if source.count("(") > _DEEPEST:
        raise _wrong(text[:100], f"at most {_DEEPEST} parentheses")
    expanded, end = _group(source, 0, text)
    if end != len(source):
        raise _wrong(text, f"no {source[end]!r} there")
    return expanded


def _group(source: str, at: int, text: str) -> tuple[str, int]:
    """What stands from ``at`` on, to the end or to the parenthesis that closes it."""
    found = ""
    while at < len(source) and source[at] != ")":
        if source[at] == "(":
            piece, at = _group(source, at + 1, text)
            if at == len(source):
                raise _wrong(text, "a ) for every (")
        elif source[at] in _LETTERS + "|":
            piece = source[at]
        else:
            raise _wrong(text, f"one of E t m L | ( ) * in place of {source[at]!r}")
        at += 1
        if source[at : at + 1] == "*":
            digits = len(source[at + 1 :]) - len(source[at + 1 :].lstrip("0123456789"))
            if not 0 < digits <= 5:
                raise _wrong(text, "a number of at most 5 digits after *")
            times, at = int(source[at + 1 : at + 1 + digits]), at + 1 + digits
            if len(piece) * times > _LONGEST:
                raise _wrong(text, f"at most {_LONGEST:,} letters when written out")
            piece *= times
        found += piece
        if len(found) > _LONGEST:
            raise _wrong(text, f"at most {_LONGEST:,} letters when written out")
    return found, at


def _wrong(text: str, expected: str) -> ConfigError:
    return ConfigError(
        f"found pipeline_model_parallel_layout {text!r}; expected {expected}. Change the layout; "
        "'Et*3|(tt|)*2L' for example has 3, 2, 2 and 0 layers"
    )


Layout = str | Sequence[int]


def stage_layers(config: Any) -> list[list[int]]:
    """The 0-based layers of every virtual stage, for a ``TransformerConfig`` or what has its fields.

    Raises ``ConfigError`` when ``num_layers`` does not come out as the configuration says.
    """
    first, last = end_counts(config)
    return divide_layers(
        config.num_layers,
        stages=config.pipeline_model_parallel_size,
        chunks=config.virtual_pipeline_model_parallel_size or 1,
        layout=getattr(config, "pipeline_model_parallel_layout", None),
        first=first,
        last=last,
        mtp_num_layers=getattr(config, "mtp_num_layers", None) or 0,
    )


def divide_layers(
    num_layers: int,
    *,
    stages: int,
    chunks: int = 1,
    layout: Layout | None = None,
    first: int | None = None,
    last: int | None = None,
    mtp_num_layers: int | None = None,
) -> list[list[int]]:
    """The 0-based layers of each of ``stages x chunks`` virtual stages, every layer once, in order.

    ``layout`` is the number of layers of every virtual stage, or Megatron-Core 0.13's text for it
    (``counts_of_text``). ``first`` and ``last`` are the layers of the first and the last stage, all their
    chunks together; the other stages share the rest evenly. Without any of them all have the same
    number. A virtual stage without a layer is possible where the embedding or the output layer is.
    ``mtp_num_layers`` is compared with a text's ``m``; None compares nothing.

    Raises ``ConfigError`` for anything that leaves a layer out or counts one twice.
    """
    if stages < 1 or chunks < 1:
        raise ConfigError(
            f"found {stages} pipeline stages of {chunks} chunks; expected at least 1 of each. Change "
            "pipeline_model_parallel_size or virtual_pipeline_model_parallel_size"
        )
    ends = first is not None or last is not None
    if layout is not None:
        if ends:
            raise ConfigError(
                "found pipeline_model_parallel_layout together with a number of layers for the first or the "
                "last stage; expected one of the two. Leave one out"
            )
        counts = _counts(layout, num_layers, stages, chunks, mtp_num_layers)
    elif ends:
        counts = _with_ends(num_layers, stages, chunks, first, last)
    else:
        counts = _even(num_layers, stages, chunks)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]


def end_counts(config: Any) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage: 0.12's field names or 0.9's. Raises ``ConfigError`` when
    both are given and differ."""
    found = []
    for new, old in (
        ("num_layers_in_first_pipeline_stage", "first_pipeline_num_layers"),
        ("num_layers_in_last_pipeline_stage", "last_pipeline_num_layers"),
    ):
        values = [value for name in (new, old) if (value := getattr(config, name, None)) is not None]
        if len(set(values)) > 1:
            raise ConfigError(f"found {new} {values[0]} and {old} {values[1]}; expected one of the two")
        found.append(values[0] if values else None)
    return found[0], found[1]


def spread(num_layers: int, parts: int) -> list[int]:
    """``num_layers`` over ``parts`` as evenly as they go, longer ones first."""
    return [num_layers // parts + (index < num_layers % parts) for index in range(parts)]


def chunks_of_layout(layout: Layout, stages: int) -> int:
    """Chunks per stage that ``layout`` describes. Raises ``ConfigError`` when they do not come out even."""
    length = len(_listed(layout))
    if length % stages or not length:
        raise ConfigError(
            f"pipeline_model_parallel_layout has {length} virtual stages; expected a multiple of "
            f"pipeline_model_parallel_size = {stages}. Change one of them"
        )
    return length // stages


def _listed(layout: Layout, mtp_num_layers: int | None = None) -> list[int]:
    counts = counts_of_text(layout, mtp_num_layers) if isinstance(layout, str) else list(layout)
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
        raise ConfigError(
            f"found pipeline_model_parallel_layout {layout!r}; expected a list of numbers of layers, one for "
            "each virtual stage, or a text such as 'Et*3|(tt|)*2L'"
        )
    return counts


def _counts(
    layout: Layout, num_layers: int, stages: int, chunks: int, mtp_num_layers: int | None
) -> list[int]:
    counts = _listed(layout, mtp_num_layers)
    if len(counts) != stages * chunks:
        raise ConfigError(
            f"pipeline_model_parallel_layout has {len(counts)} virtual stages; expected {stages} pipeline "
            f"stages x {chunks} chunks = {stages * chunks}. Change it, pipeline_model_parallel_size or "
            "virtual_pipeline_model_parallel_size"
        )
    if sum(counts) != num_layers:
        raise ConfigError(
            f"pipeline_model_parallel_layout has {sum(counts)} layers ({counts}); expected num_layers = "
            f"{num_layers}. Change one of them"
        )
    for index, count in enumerate(counts[1:-1], start=1):
        if count == 0:
            raise ConfigError(
                f"virtual stage {index} of pipeline_model_parallel_layout {counts} has no layer; expected at "
                "least one where neither the embedding nor the output layer is"
            )
    return counts


def _even(num_layers: int, stages: int, chunks: int) -> list[int]:
    virtual = stages * chunks
    if num_layers % virtual:
        example = ",".join(map(str, spread(num_layers, virtual)))
        raise ConfigError(
            f"num_layers is {num_layers}; expected a multiple of pipeline stages x chunks per stage = "
            f"{stages} x {chunks}, or a layout. Change one of them, or give pipeline_model_parallel_layout, "
            f"{example} for example"
        )
    return [num_layers // virtual] * virtual


def _with_ends(num_layers: int, stages: int, chunks: int, first: int | None, last: int | None) -> list[int]:
    given = [value for value in (first, last) if value is not None]
    rest, others = num_layers - sum(given), stages - len(given)
    fits = min(given) >= 0 and others >= 0 and rest >= 0
    if not fits or (rest % others if others else rest):
        raise ConfigError(
            f"first stage {first} and last stage {last} leave {rest} of {num_layers} layers to {others} "
            "other pipeline stages; expected an equal number for each. Change "
            "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or "
            "pipeline_model_parallel_size, or give pipeline_model_parallel_layout"
        )
    per_stage = [rest // others if others else 0] * stages
    if first is not None:
        per_stage[0] = first
    if last is not None:
        per_stage[-1] = last
    for index, count in enumerate(per_stage):
        if count % chunks or (count == 0 and (chunks > 1 or 0 < index < stages - 1)):
            raise ConfigError(
                f"pipeline stage {index} has {count} layers for {chunks} chunks; expected a multiple of the "
                "chunks, and at least one layer in every chunk. Change the number of layers of the first "
                "and the last stage, or give pipeline_model_parallel_layout"
            )
    return [count // chunks for _ in range(chunks) for count in per_stage]

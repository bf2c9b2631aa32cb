"""Megatron-Core 0.13's text for a pipeline layout, read into layers per virtual stage.

``|`` ends a virtual stage, ``E`` is the embedding, ``t`` a transformer layer, ``m`` a multi-token prediction
layer, ``L`` the output layer and the loss; ``x*n`` repeats one letter or a group in parentheses; commas
mean nothing. ``Et*3|(tt|)*29,m|L`` has 31 virtual stages: 3, 29 times 2, and none but ``m`` and ``L``.
"""

from __future__ import annotations

from mt_megatron.errors import ConfigError

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

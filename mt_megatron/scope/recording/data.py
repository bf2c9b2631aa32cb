"""Records that readers of a recording get: frozen, with arrays, none of which refers to a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NOT_FINITE = "not_finite"
"""The statistic that counts NaN and infinite elements."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One start of the training processes, or a rewind to an earlier step within it."""

    number: int
    """Counted from 0 through the run."""

    name: str
    attempt: int
    """0, and one more for each rewind within the start."""

    started_ns: int
    """Since the epoch."""

    world_size: int
    first_step: int | None
    """None: nothing was recorded in it, or only a step that was made beside the run."""

    last_current: int | None
    """Last step that no later session records anew; None: all that are recorded. Smaller than ``first_step``
    where a later session replaced the whole of it."""

    ranks: tuple[int, ...]
    """Ranks whose node has them in its file."""

    @property
    def missing_ranks(self) -> int:
        """Ranks of the run that no file knows: values may lack their parts."""
        return self.world_size - len(self.ranks)

    def is_current(self, step: int) -> bool:
        """Whether ``step`` of this session is what the run went on from."""
        return (
            self.first_step is not None
            and step >= self.first_step
            and (self.last_current is None or step <= self.last_current)
        )


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank of a session."""

    rank: int
    at: Mapping[str, Any]
    """Coordinates: tp, pp, dp, cp, ep."""

    host: str
    pid: int
    node: int
    connected_ns: int
    ended_ns: int | None
    """When the rank said that it ends; None: it runs, or it was killed."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a run in one session: layout, model, ranks."""

    session: Session
    layout: Mapping[str, Any]
    model: Mapping[str, Any]
    ranks: tuple[RankFacts, ...]
    sessions: tuple[Session, ...]
    """All of the run, oldest first."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the whole model."""

    path: str
    class_name: str
    layer: int | None
    """Counted through the whole model from 0; None outside of layers, as in a depth of multi-token
    prediction."""

    parameters: int
    """Elements that one rank holds of it: the most of any rank."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Name:
    """A statistic of a module that has values."""

    path: str
    statistic: str
    unit: str
    meaning: str
    layer: int | None
    is_vector: bool


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Training steps, ascending; all arrays of one length. NaN: not known."""

    step: Integers
    session: Integers
    time_ns: Integers
    """When the first rank ended the step, since the epoch."""

    seconds: Floats
    """Of the slowest rank."""

    loss: Floats
    grad_norm: Floats
    lr: Floats
    tokens: Floats
    tokens_per_second: Floats
    memory_bytes: Floats
    """Of the rank with most."""

    ranks: Integers
    """Ranks that reported the step."""

    skipped: NDArray[np.bool_]
    perturbed: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """One step of one rank."""

    rank: int
    seconds: float
    memory_bytes: float
    time_ns: int


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one statistic of one module by step, ascending; all arrays of one length."""

    path: str
    statistic: str
    step: Integers
    session: Integers
    value: Floats
    parts: Integers
    """Ranks' parts that came."""

    of: Integers
    """Parts that make a whole value."""

    partial: NDArray[np.bool_]
    """Parts are missing, or whole ranks of the session are, whose share nobody knows."""

    perturbed: NDArray[np.bool_]

    vector: Floats | None = None
    """[steps, elements] where vectors were asked for; NaN where retention has removed them."""

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Values that have all parts which ranks have announced, bool [steps]: others say nothing of the
        training. NaN and infinite elements count with any of their parts."""
        found: NDArray[np.bool_] = self.parts >= self.of
        return found | (self.value > 0) if self.statistic == NOT_FINITE else found

    def only_whole(self) -> Series:
        """The series without the other values."""
        kept = self.whole
        if kept.all():
            return self
        names = ("step", "session", "value", "parts", "of", "partial", "perturbed")
        arrays = {name: getattr(self, name)[kept] for name in names}
        return replace(self, **arrays, vector=None if self.vector is None else self.vector[kept])


@dataclass(frozen=True, kw_only=True)
class Value:
    """One statistic of one module in one step."""

    path: str
    statistic: str
    value: float
    parts: int
    of: int
    partial: bool
    vector: Floats | None = None

    @property
    def whole(self) -> bool:
        """As ``Series.whole``."""
        return self.parts >= self.of or (self.statistic == NOT_FINITE and self.value > 0)


@dataclass(frozen=True, kw_only=True)
class TensorKey:
    """Key of a tensor, as ``tensor`` and ``overview`` take it."""

    step: int
    session: int
    path: str
    what: str
    microbatch: int
    index: Mapping[str, int]
    """Of what it is a part: head, sample ..."""

    shape: tuple[int, ...]
    """Of the whole tensor."""

    perturbed: str | None
    bytes: int
    """In the files."""

    rank: int
    """The first rank that sent a shard of it."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An assembled tensor, or a window of it."""

    key: TensorKey
    values: NDArray[np.float32]
    """NaN where no shard came."""

    missing: float
    """Share of the elements that no shard has, 0 to 1."""

    error: float
    """Largest absolute error of the encodings; 0 for float32."""

    encodings: tuple[str, ...]

    block: int = 1
    """Rows and columns of the tensor that a value of an overview stands for; blocks at the ends may be
    smaller."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Tokens of one sample with what the model made of them; arrays of one length."""

    step: int
    session: int

    path: str
    """``output_layer``, or a layer: what its output would predict (logit lens)."""

    microbatch: int
    """Of the rank that has the sample."""

    sample: int
    """Number of the sequence within the step's global batch, in the order of the data."""

    missing_parts: int
    """Tensor-parallel ranks whose words are not in; 0: the whole vocabulary is."""

    position: Integers
    """Within the sequence, ascending."""

    ids: Integers
    """Of the tokens that are predicted: each the one after its position."""

    loss: Floats
    """nats; NaN: not known."""

    entropy: Floats
    top_ids: Integers
    """[tokens, k]; k is 0 where no candidates were asked for; -1 beside fewer."""

    top_logprobs: Floats
    """[tokens, k], nats."""


@dataclass(frozen=True, kw_only=True)
class AlertRecord:
    """A statistic that left its band, a first NaN or dead experts."""

    step: int
    session: int
    time_ns: int
    kind: str
    path: str
    statistic: str
    value: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Frames that a rank's queue, a sidecar or a page did not take, since the session's start."""

    source: str
    """``rank`` (its queue was full), ``sidecar`` (a slow disk, tensors beyond the bound) or ``checks`` (the
    sidecar's, of what a frame holds)."""

    rank: int
    session: int
    step: int
    frames: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """Steps that retention removed from one node's file."""

    node: int
    kind: str
    steps: int
    first_step: int
    last_step: int
    time_ns: int

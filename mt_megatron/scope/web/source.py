"""What the page needs of a recording and of the run behind it, as Protocols."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

STEP_COLUMNS = (
    "t",
    "seconds",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "memory_bytes",
)
"""Columns of ``Source.steps`` beside ``i`` and ``perturbed``; ``t`` in ns since the epoch, ``seconds`` of one
step, ``memory_bytes`` the most of any rank."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the whole model."""

    path: str
    class_name: str
    parameters: int


@dataclass(frozen=True, kw_only=True, order=True)
class TensorName:
    """What identifies a recorded tensor, apart from its step."""

    path: str
    what: str
    """``activation``, ``attention``, ``logit_lens`` ..."""

    microbatch: int = 0
    index: tuple[tuple[str, int], ...] = ()
    """(``layer``, 3), (``head``, 0) ...; ascending by name."""

    @property
    def text(self) -> str:
        """For a URL: ``attention@decoder.layers.3.self_attention#head=0#microbatch=0``."""
        parts = [*self.index, ("microbatch", self.microbatch)]
        return f"{self.what}@{self.path}" + "".join(f"#{key}={value}" for key, value in parts)


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """A tensor and the steps at which it was recorded."""

    name: TensorName
    steps: tuple[int, ...]
    """Ascending; at least one."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the whole tensor at each step: another request records another part of it."""

    stamps: tuple[int, ...]
    """A number of each step that changes when shards come later, or the step is made again."""

    @property
    def shape(self) -> tuple[int, ...]:
        """At the newest step."""
        return self.shapes[-1]

    def shape_at(self, step: int) -> tuple[int, ...]:
        """At ``step``; the newest step's where the tensor was not recorded."""
        at = self._place(step)
        return self.shape if at is None else self.shapes[at]

    def first_like(self, step: int) -> int:
        """The first step at which the tensor had the shape of ``step``."""
        return self.steps[self.shapes.index(self.shape_at(step))]

    def stamp(self, step: int) -> int:
        """Of ``step``; 0 where the tensor was not recorded."""
        at = self._place(step)
        return 0 if at is None else self.stamps[at]

    def _place(self, step: int) -> int | None:
        at = bisect_left(self.steps, step)
        return at if at < len(self.steps) and self.steps[at] == step else None


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A part or an overview of a tensor as a matrix, whose rows are all dimensions but the last."""

    values: NDArray[np.float32]
    """[rows, columns]; NaN where no shard came."""

    error: float = 0.0
    """Largest absolute error of the encoding; 0: exact in float32."""

    missing: float = 0.0
    """Share of the elements that no shard has."""

    perturbed: str | None = None


By = Literal["max", "mean"]
"""How the elements of a block become one: the one of the largest absolute value, so that nothing outstanding
is lost (of attention the largest probability), or their mean."""


class TokenKey(NamedTuple):
    """The tokens of one sample at one step, seen at one place of the model."""

    step: int
    sample: int
    """Number of the sequence within the step's global batch."""

    microbatch: int
    path: str
    """``output_layer``, or a layer's path: what its output would predict (logit lens)."""


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """The tokens of one ``TokenKey``."""

    position: NDArray[np.int64]
    """In the sequence, ascending."""

    ids: NDArray[np.int64]
    """The tokens that were to be predicted: each stands one place after its position."""

    loss: NDArray[np.float32]
    """nats, of ``ids``; NaN where it is not known."""

    entropy: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    """[tokens, k], most probable first."""

    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A statistic that left its band, or what else is worth a look."""

    step: int
    text: str
    path: str = ""
    statistic: str = ""
    value: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")


@dataclass(frozen=True, kw_only=True)
class Bookmark:
    """A step that somebody marked."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """What was not recorded since the session's start."""

    frames: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = field(default=())
    """Sentences on what else is missing: a full disk, a node whose file cannot be read."""


class Source(Protocol):
    """A recording, growing or ended. All methods may be called from several threads. Unknown names raise
    ``KeyError``."""

    def revision(self) -> int:
        """A number that grows when something was recorded."""

    def facts(self) -> Mapping[str, Any]:
        """``name``, ``folder`` (of the run), ``live``, ``world_size``, ``ranks`` (list of rank, host, tp, pp,
        dp, cp, ep), ``model`` (plain map), ``steps_total`` (or None), ``started`` (s since the epoch, or
        None)."""

    def modules(self) -> Sequence[Module]:
        """In the order of the model."""

    def steps(self) -> Mapping[str, NDArray[Any]]:
        """``i`` (int64, ascending), ``STEP_COLUMNS`` (float64, NaN where unknown), ``perturbed`` (bool)."""

    def statistics(self) -> Mapping[str, Sequence[str]]:
        """Path -> names of its statistics; the path of what belongs to the whole model is empty."""

    def series(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values."""

    def vectors(self, path: str, statistic: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps [n] and vectors [n, length]."""

    def tensors(self) -> Sequence[TensorFacts]:
        """All that was recorded and is kept."""

    def window(self, name: TensorName, step: int, rows: tuple[int, int], columns: tuple[int, int]) -> Matrix:
        """Elements of rows ``rows[0]`` to ``rows[1]`` (exclusive) and columns likewise."""

    def overview(self, name: TensorName, step: int, block: int, by: By) -> Matrix:
        """The whole tensor, each value a block of ``block`` x ``block`` elements, at the edges less."""

    def token_rows(self) -> Sequence[TokenKey]:
        """All that are kept, ascending."""

    def tokens(self, key: TokenKey) -> TokenRow:
        """One sample's tokens."""

    def text_of(self, ids: Sequence[int]) -> Sequence[str] | None:
        """The piece of text of each token; None without a tokenizer."""

    def alerts(self) -> Sequence[Alert]:
        """Oldest first."""

    def bookmarks(self) -> Sequence[Bookmark]:
        """Ascending by step."""

    def bookmark(self, mark: Bookmark) -> None:
        """Keep one. Raises ``ScopeError`` for a text that is none, ``OSError`` where the recording cannot be
        written."""

    def dropped(self) -> Dropped:
        """What is missing."""


class Subscription(Protocol):
    """Events of one client, out of a bounded queue: what does not fit is dropped and counted."""

    dropped: int

    def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]: ...

    def close(self) -> None:
        """End it."""


class CommandResult(Protocol):
    """Answer to a command."""

    @property
    def ok(self) -> bool: ...

    @property
    def value(self) -> Any: ...

    @property
    def error(self) -> str | None: ...


class Live(Protocol):
    """The running training behind a recording: the sidecar's hub."""

    live: bool
    """Whether a training may be connected."""

    def subscribe(self, most: int = 256) -> Subscription:
        """Events from now on: ``k`` is step, stats, tensor, tokens, alert, dropped, result, ..."""

    async def command(
        self, do: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 30.0
    ) -> CommandResult:
        """Send a command to global rank 0 and wait for its result; without one in time it is not ``ok``."""

    def set_requests(self, texts: Sequence[str]) -> None:
        """Ask the ranks of all nodes for ``texts`` instead of what they were asked for before."""

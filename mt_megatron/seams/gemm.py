"""The three matrix products of a linear layer, by role, behind one replaceable function.

Every dense and expert linear computes ``y = x @ w.T`` forward, ``dx = dy @ w`` and
``dw = dy.T @ x`` backward, and asks ``gemm`` for each. A feature that computes some weights' products
otherwise (FP8) gives those weights a ``GemmRecipe``; one that replaces all of them installs its function
with ``set_gemm``; one that wants the weight gradients later than the rest of backward (zero-bubble
schedules) collects them with ``deferred_wgrad``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import ConfigError, MtMegatronError
from . import onednn, widened

if TYPE_CHECKING:
    from .grouped_gemm import TokenGroups

GemmRole = Literal["fprop", "dgrad", "wgrad"]

_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")


@dataclass(frozen=True, slots=True)
class WeightRef:
    """Which weight a product belongs to: what a recipe needs to cast a weight once for many products."""

    parameter: Tensor
    """The parameter itself; for experts all of them, [experts, outputs, inputs]."""

    expert: int | None = None
    """The expert whose matrix it is; None for a plain linear, and for all experts at once."""

    @property
    def version(self) -> int | None:
        """Changes with in-place updates that torch sees; None where it counts none. Megatron's optimizers
        write through ``.data``, which it does not see: ask for it within a step only."""
        return None if self.parameter.is_inference() else self.parameter._version

    @property
    def recipe(self) -> Any:
        """The parameter's ``gemm_recipe``, or None."""
        return getattr(self.parameter, "gemm_recipe", None)


class Operand(Protocol):
    """An input or output gradient as a recipe keeps it, cast for its products or still to be cast."""

    def parts(self, role: GemmRole) -> tuple[Tensor, ...] | None:
        """What the ranks of a group gather along the first dimension to have ``role``'s operand of all
        their rows. None: that cannot be put together from parts, gather ``source``. May communicate."""

    def gathered(self, role: GemmRole, parts: tuple[Tensor, ...]) -> Any:
        """The operand of all rows, from the gathered ``parts``."""

    def saved(self) -> tuple[Tensor, ...]:
        """What backward keeps to have wgrad's operand again."""

    source: Tensor | None
    """[rows, columns] before the cast; None where it was not kept."""


@runtime_checkable
class GemmRecipe(Protocol):
    """A weight's ``gemm_recipe``: computes this weight's products, unless ``set_gemm`` has replaced all."""

    def prepared(
        self,
        kind: Literal["input", "grad"],
        x: Tensor,
        weight: WeightRef,
        *,
        group: Any,
        keep: bool,
        groups: TokenGroups | None = None,
    ) -> Tensor | Operand:
        """``x`` [rows, columns] as operand of this weight's products. ``group``: a process group whose ranks
        will gather it, None for none. ``keep``: whether backward will need it. ``groups``: the rows of each
        expert, where it will be an operand of grouped products."""

    def restored(self, tensors: tuple[Tensor, ...], weight: WeightRef, *, group: Any) -> Tensor | Operand:
        """wgrad's operand from what ``Operand.saved`` returned."""

    def product(
        self,
        role: GemmRole,
        a: Any,
        b: Any,
        weight: WeightRef,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """``gemm``; operands are tensors or what ``prepared`` made of them."""

    def grouped(
        self,
        role: GemmRole,
        a: Any,
        b: Any,
        groups: TokenGroups,
        weight: WeightRef,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """``grouped_gemm``."""


class Gemm(Protocol):
    """What ``set_gemm`` takes; the arguments are those of ``gemm``."""

    def __call__(
        self,
        role: GemmRole,
        a: Tensor,
        b: Tensor,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        recipe: Any = None,
    ) -> Tensor: ...


def gemm(
    role: GemmRole,
    a: Any,
    b: Any,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    recipe: Any = None,
    weight: WeightRef | None = None,
) -> Tensor:
    """One product of a linear with T tokens, K inputs and N outputs; all operands have two dims.

    ======  ================  =================  =============
    role    ``a``             ``b``              result
    ======  ================  =================  =============
    fprop   input (T, K)      weight (N, K)      output (T, N)
    dgrad   grad out (T, N)   weight (N, K)      grad in (T, K)
    wgrad   grad out (T, N)   input (T, K)       grad w (N, K)
    ======  ================  =================  =============

    ``out`` receives the result and may have another dtype (an fp32 gradient buffer under bf16);
    with ``accumulate`` it is added to what ``out`` holds. ``recipe`` is a ``GemmRecipe``, or whatever the
    installed implementation understands; linears pass their weight's ``gemm_recipe`` attribute, or None,
    and say with ``weight`` whose product it is. Input and gradient may be what ``prepared`` returned.
    Runs outside autograd and autocast: operands come in the dtype to compute in.
    """
    if weight is not None and computes_itself(recipe):
        return recipe.product(role, a, b, weight, out=out, accumulate=accumulate)  # type: ignore[no-any-return]
    return _gemm(role, a, b, out=out, accumulate=accumulate, recipe=recipe)


def computes_itself(recipe: Any) -> bool:
    """Whether products with ``recipe`` are its own business: it is a ``GemmRecipe``, and ``set_gemm`` has
    replaced nothing."""
    return recipe is not None and _gemm is torch_gemm and isinstance(recipe, GemmRecipe)


def prepared(
    kind: Literal["input", "grad"],
    x: Tensor,
    weight: WeightRef,
    *,
    group: Any = None,
    keep: bool = False,
    groups: TokenGroups | None = None,
) -> Tensor | Operand:
    """``x`` [rows, columns] as the weight's recipe wants it in ``gemm``, with ``groups`` in ``grouped_gemm``;
    without a recipe ``x`` itself.

    To be called once for each input and each output gradient, so that they are cast once. ``group``,
    ``keep`` and ``groups`` are as in ``GemmRecipe.prepared``.
    """
    recipe = weight.recipe
    if computes_itself(recipe):
        made: Tensor | Operand = recipe.prepared(kind, x, weight, group=group, keep=keep, groups=groups)
        return made
    return x


def saved(operand: Tensor | Operand) -> tuple[Tensor, ...]:
    """The tensors that backward keeps of an input."""
    return (operand,) if isinstance(operand, Tensor) else operand.saved()


def restored(tensors: tuple[Tensor, ...], weight: WeightRef, *, group: Any = None) -> Tensor | Operand:
    """The input again, from what ``saved`` returned."""
    recipe = weight.recipe
    if computes_itself(recipe):
        return recipe.restored(tensors, weight, group=group)  # type: ignore[no-any-return]
    return tensors[0]


def torch_gemm(
    role: GemmRole,
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    recipe: Any = None,
    widen: bool = False,
) -> Tensor:
    """The default: ``torch.mm`` in the operands' dtype, or oneDNN where that is faster for fp32 (``onednn``).

    ``widen``, and ``cpu_bf16_products`` for the whole run: bf16 products run by fp32 kernels where torch has
    none for bf16 (``widened``).

    A result that goes into an fp32 ``out`` under bf16 or fp16 is rounded on the way, except on CUDA
    with torch 2.8 or later: nothing else in torch has a GEMM that returns its fp32 accumulators.
    Raises ConfigError for a recipe, which it cannot follow.
    """
    if recipe is not None:
        raise ConfigError(
            f"a weight asks for the GEMM recipe {recipe!r}, but only torch's plain GEMM is installed; "
            "install the feature that understands it (seams.gemm.set_gemm) or remove weight.gemm_recipe"
        )
    if role == "fprop":
        b = b.t()
    elif role == "wgrad":
        a = a.t()
    if onednn.suits(a, b):
        return onednn.matmul(a, b, out=out, accumulate=accumulate)
    if (widen or widened.everywhere()) and widened.suits(a, b):
        return widened.matmul(a, b, out=out, accumulate=accumulate)
    if out is None:
        return torch.mm(a, b)
    if out.dtype != a.dtype:
        if out.dtype is torch.float32 and a.is_cuda and _HAS_OUT_DTYPE:
            result = torch.ops.aten.mm.dtype(a, b, torch.float32)
        else:
            result = torch.mm(a, b)
        return out.add_(result) if accumulate else out.copy_(result)
    return out.addmm_(a, b) if accumulate else torch.mm(a, b, out=out)


_gemm: Gemm = torch_gemm


def set_gemm(implementation: Gemm | None) -> None:
    """Install ``implementation`` for every linear of the process; None goes back to ``torch_gemm``.

    Raises ConfigError when another one is installed: two features cannot both own the GEMMs.
    """
    global _gemm
    if implementation is not None and _gemm not in (torch_gemm, implementation):
        raise ConfigError(
            f"cannot install {implementation!r}: the GEMMs are already computed by {_gemm!r}; "
            "call set_gemm(None) first"
        )
    _gemm = torch_gemm if implementation is None else implementation


def is_plain() -> bool:
    """Whether no other implementation is installed, so that a faster equal of ``torch_gemm`` may run for
    weights without a recipe."""
    return _gemm is torch_gemm


class DeferredWgrad:
    """Weight gradients whose inputs are kept until ``flush`` computes them, first in, first out.

    Everything that waits keeps its layer's input and output gradient alive.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, weight: Tensor, compute: Callable[[], None]) -> None:
        """Queue ``compute``, which must bring the gradient all the way to where it is expected
        (``weight.grad`` or ``weight.main_grad``) and tell whoever waits for it."""
        self._waiting.append((weight, compute))
        _pending[id(weight)] = _pending.get(id(weight), 0) + 1

    def flush(self, limit: int | None = None) -> int:
        """Compute the oldest ``limit`` gradients (None: all). Returns how many were computed."""
        count = len(self._waiting) if limit is None else min(limit, len(self._waiting))
        for _ in range(count):
            self._pop()()
        return count

    def discard(self) -> int:
        """Forget what waits, after a step that is thrown away. Returns how many were dropped."""
        count = len(self._waiting)
        while self._waiting:
            self._pop()
        return count

    def _pop(self) -> Callable[[], None]:
        weight, compute = self._waiting.popleft()
        left = _pending[id(weight)] - 1
        if left:
            _pending[id(weight)] = left
        else:
            del _pending[id(weight)]
        return compute


# By id: the queue that waits for a weight also keeps it alive.
_pending: dict[int, int] = {}
_queue: DeferredWgrad | None = None


@contextmanager
def deferred_wgrad(queue: DeferredWgrad | None = None) -> Iterator[DeferredWgrad]:
    """Within it, backward of a linear queues the weight gradient instead of computing it.

    Yields ``queue``, or a new one. Leaving does not flush: call ``flush`` when there is time, and
    before gradients are reduced. It holds for all threads, since autograd runs backward in its own.
    A hook that waits for a parameter's gradient runs twice: in backward, where torch calls it with
    no gradient, and when the gradient is flushed.
    """
    global _queue
    outer = _queue
    _queue = DeferredWgrad() if queue is None else queue
    try:
        yield _queue
    finally:
        _queue = outer


_WHOLE = "_mt_megatron_whole_backward"
"""Attribute of a weight whose gradients are never queued."""

_uses: Counter[Tensor] | None = None


@contextmanager
def finding_shared_weights() -> Iterator[None]:
    """Within it the forward pass of one micro-batch runs: weights that linears use more than once are not
    ``is_deferrable`` from its end on. Autograd adds up the gradients of one backward pass before they are
    accumulated; computed later, one by one, their sum would be rounded otherwise."""
    global _uses
    outer, _uses = _uses, Counter()
    try:
        yield
    finally:
        found, _uses = _uses, outer
        for weight, count in found.items():
            if count > 1:
                setattr(weight, _WHOLE, True)


def note_use(weight: Tensor) -> None:
    """A linear's forward pass with ``weight``."""
    if _uses is not None:
        _uses[weight] += 1


def is_deferrable(weight: Tensor) -> bool:
    """True where the gradient of ``weight`` may be queued: it is a parameter (that of a computed weight is an
    input of the backward pass that runs now), and nothing else adds to its gradient in a backward pass."""
    if not isinstance(weight, torch.nn.Parameter) or not weight.is_leaf:
        return False
    # ``zero_out_wgrad``: upstream's mark of an output layer's weight that is an embedding's on this stage.
    return not (hasattr(weight, _WHOLE) or getattr(weight, "zero_out_wgrad", False))


def wgrad_queue() -> DeferredWgrad | None:
    """The queue of the innermost ``deferred_wgrad``, for the backward of a linear."""
    return _queue


def wgrad_pending(weight: Tensor) -> bool:
    """Whether some queue still holds a gradient of ``weight``."""
    return id(weight) in _pending


def require_no_pending_wgrad(weights: Iterator[Tensor]) -> None:
    """Raise when a gradient of one of ``weights`` was deferred and not flushed: it would be lost."""
    if not _pending:
        return
    missing = sum(_pending.get(id(weight), 0) for weight in weights)
    if missing:
        raise MtMegatronError(
            f"{missing} deferred weight gradient(s) are still queued while gradients are being reduced; call "
            "flush() on the queue of deferred_wgrad() before the reduction (or discard() to drop the step)"
        )

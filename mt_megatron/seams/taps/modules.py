"""Calls of a module, watched or changed: ``forward`` is replaced on the module while a tap is open.

torch's own hooks take ten times as long to be called, switch the blocked loss off where they are on the
output layer, and for input gradients put nodes into the graph. Here gradients come from hooks on the
tensors, which go with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial, update_wrapper
from threading import RLock
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mt_megatron.seams.taps import progress

_log = logging.getLogger("mt_megatron")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Call(NamedTuple):
    """One call of a tapped module."""

    module: nn.Module

    microbatch: int
    """From 0 within the step; -1 where no schedule says it. In gradients' callbacks it is that of the
    forward call too."""

    chunk: int
    """Of this pipeline stage; -1 where no schedule says it."""

    ordinal: int
    """Calls of the module before this one in the same micro-batch (tied modules, prediction depths); -1
    without a micro-batch. A recomputed call has that of the call it repeats."""

    recomputing: bool
    """Whether it repeats an earlier call, for backward."""


Before = Callable[[Call, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Call, Any], None]
Gradient = Callable[[Call, Tensor, int], None]


class Watch:
    """An open tap, as ``watch`` and its kin make it. A context manager that closes it."""

    def __init__(
        self, what: str, told: Callable[[str], None] | None, errors: Literal["close", "raise"]
    ) -> None:
        self.failed: str | None = None
        """What a callback raised, which has closed the tap."""

        self._what = what
        self._told = told
        self._raises = errors == "raise"
        self._closing: list[Callable[[], None]] = []
        self.closed = False

    def close(self) -> None:
        """Leave everything as it was; no callback is called from here on. May be called again."""
        with _changing:
            self.closed = True
            closing, self._closing = self._closing, []
        for each in reversed(closing):
            each()

    def on_close(self, action: Callable[[], None]) -> None:
        """Call ``action`` at the end, the last given first."""
        self._closing.append(action)

    def tell(self, callback: Callable[..., Any], *args: Any) -> Any:
        """``callback(*args)``; what it raises closes the tap, is told once, and None is returned."""
        if self.closed:
            return None
        try:
            return callback(*args)
        except Exception as error:
            if self._raises:
                raise
            self.fail(error)
            return None

    def leave(self, manager: AbstractContextManager[Any], *how: Any) -> None:
        """The same for the exit of ``manager``, also where the tap was closed within."""
        try:
            manager.__exit__(*how)
        except Exception as error:
            if self._raises:
                raise
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Close because of ``error`` and say so once."""
        if self.failed is not None:
            return
        self.failed = f"{type(error).__name__}: {error}"
        self.close()
        if self._told is None:
            _log.warning("the tap on %s is closed and training goes on: %s", self._what, self.failed)
        else:
            self._told(self.failed)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def watch(
    module: nn.Module,
    *,
    before: Before | None = None,
    after: After | None = None,
    output_gradient: Gradient | None = None,
    input_gradient: Gradient | None = None,
    around: Callable[[], AbstractContextManager[Any]] | None = None,
    backward: Callable[[bool], None] | None = None,
    method: str = "forward",
    recomputed: bool = False,
    live: bool = False,
    whole_output: bool = False,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Call back at every call of ``module`` until the returned tap is closed.

    - ``before(call, args, kwargs)`` and ``after(call, output)``: the arguments and what the module returns in
      their own structure (tuples, lists, dicts), with every tensor detached. A recomputed forward is left
      out, unless ``recomputed``.
    - ``output_gradient(call, gradient, index)``: the gradient of the loss (as scaled) with respect to the
      ``index``-th tensor of the output, counted through its structure; once per call, also where the call
      is recomputed for backward.
    - ``input_gradient(call, gradient, index)``: the same for the tensors of ``args`` and then ``kwargs``,
      parameters left out. It is the gradient of the tensor, summed over all that use it, not this module's
      share.
    - ``around()``: a context manager entered around the forward, recomputed ones included.
    - ``backward(begins)``: without tensors, when the gradient of the output is complete (True) and when that
      of the input is (False); only where both can be seen.

    Callbacks get tensors that share memory with the run's and may be overwritten or freed after the
    callback; they run without gradients, and in autograd's threads for gradients. What one raises closes
    this tap alone and is told once: to ``told(text)``, by default a warning in the log. ``errors="raise"``
    lets it through.

    The output layer of a blocked loss returns no logits: ``after`` and ``output_gradient`` are not called
    then (``loss_blocks`` gives them). ``whole_output`` asks for them: it switches the blocked loss off.
    ``method`` is another method of the module than ``forward``, to be watched in its place. ``live`` hands
    the run's own tensors to ``before`` and ``after``, for a watch that knows a tensor by identity or
    hooks it, or that keeps none and saves the time: detaching takes as long as a kernel's launch.
    """
    made = _ModuleWatch(_named(module), told, errors)
    made.before, made.after = before, after
    made.output_gradient, made.input_gradient = output_gradient, input_gradient
    made.around, made.backward = around, backward
    made.recomputed, made.live, made.whole_output = recomputed, live, whole_output
    _attach(module, method, made)
    return made


def change(
    module: nn.Module,
    *,
    output: Callable[[Call, Any], Any] | None = None,
    output_gradient: Callable[[Call, Tensor, int], Tensor | None] | None = None,
    input: Callable[[Call, tuple[Any, ...], dict[str, Any]], Arguments | None] | None = None,
    errors: Literal["close", "raise"] = "close",
    told: Callable[[str], None] | None = None,
) -> Watch:
    """Replace values at every call of ``module`` until the returned tap is closed.

    - ``input(call, args, kwargs)`` returns other ``(args, kwargs)`` for the module, or None.
    - ``output(call, output)`` returns what the caller gets instead, of the same structure, or None. Tensors
      are the run's own, with gradients: a new tensor computed from them stays in the graph. A stage's
      last output must not be a view.
    - ``output_gradient(call, gradient, index)`` returns another gradient, or None.

    Input and output are replaced in recomputed calls as well, or backward would be of another function:
    decide by ``call.microbatch`` and ``call.ordinal``, which are the same then, so that the same is
    replaced. Watches see replaced values. What a callback raises closes this tap and leaves the value as it
    is.
    """
    made = _ModuleWatch(_named(module), told, errors)
    made.changed_input, made.changed_output, made.changed_gradient = input, output, output_gradient
    _attach(module, "forward", made)
    return made


class _ModuleWatch(Watch):
    before: Before | None = None
    after: After | None = None
    output_gradient: Gradient | None = None
    input_gradient: Gradient | None = None
    around: Callable[[], AbstractContextManager[Any]] | None = None
    backward: Callable[[bool], None] | None = None
    changed_input: Callable[..., Arguments | None] | None = None
    changed_output: Callable[[Call, Any], Any] | None = None
    changed_gradient: Callable[[Call, Tensor, int], Tensor | None] | None = None
    recomputed = False
    live = False
    whole_output = False


_changing = RLock()


def _attach(module: nn.Module, name: str, made: _ModuleWatch) -> None:
    with _changing:
        found = vars(module).get(name)
        if not isinstance(found, Tapped):
            found = Tapped(module, name)
        found.watches = (*found.watches, made)
        found.plan = _Plan(found.watches)

    def detach() -> None:
        with _changing:
            found.watches = tuple(each for each in found.watches if each is not made)
            found.plan = _Plan(found.watches) if found.watches else None
            if not found.watches:
                found.take_off()

    made.on_close(progress.follow())
    made.on_close(detach)


class Tapped:
    """Stands for a module's method, which is ``__wrapped__``, while a tap is open on it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._own = name in vars(module)
        inner = getattr(module, name)
        # Takes over the attributes of what it wraps, which may be of this class: ours come last.
        update_wrapper(self, inner)
        self.module = module
        self.name = name
        self.watches: tuple[Any, ...] = ()
        self.plan: _Plan | None = None
        self.__wrapped__: Callable[..., Any] = inner
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan
        if plan is None:
            return self.__wrapped__(*args, **kwargs)
        return _run(self, plan, self.__wrapped__, args, kwargs)

    def take_off(self) -> None:
        """Put the method back. Who replaced it after us calls ours, which does nothing more."""
        if vars(self.module).get(self.name) is self:
            if self._own:
                vars(self.module)[self.name] = self.__wrapped__
            else:
                del vars(self.module)[self.name]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied module computes with its own weights, and is not watched.
        return deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return self.__wrapped__.__reduce__()


def untapped(module: nn.Module, name: str) -> Any:
    """The method ``name`` of ``module`` below its taps."""
    found = getattr(module, name)
    while isinstance(found, Tapped):
        found = found.__wrapped__
    return found


@contextmanager
def replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within it ``function`` stands for the method ``name`` of ``module`` and returns no output to look at:
    open taps see its arguments and the gradients of them."""
    values = vars(module)
    with _changing:
        had, found = name in values, values.get(name)
        if isinstance(found, Tapped):
            tap = found

            def stand_in(*args: Any, **kwargs: Any) -> Any:
                if tap.plan is None:
                    return function(*args, **kwargs)
                return _run(tap, tap.plan, function, args, kwargs, hidden=True)

            values[name] = stand_in
        else:
            values[name] = function
    try:
        yield
    finally:
        with _changing:
            if not had:
                del values[name]
            else:
                values[name] = found
                if isinstance(found, Tapped) and found.plan is None:
                    found.take_off()


def wants_output(module: nn.Module) -> bool:
    """Whether an open tap asks for the ``whole_output`` of ``module``."""
    found = vars(module).get("forward")
    return isinstance(found, Tapped) and any(getattr(each, "whole_output", False) for each in found.watches)


class _Plan:
    """Taps by what they ask for, in the order in which they were opened."""

    __slots__ = (
        "afters",
        "arounds",
        "backwards",
        "befores",
        "counts",
        "gradients",
        "input_changes",
        "input_gradients",
        "output_changes",
    )

    def __init__(self, watches: tuple[Any, ...]) -> None:
        def with_(name: str) -> tuple[Any, ...]:
            return tuple(each for each in watches if getattr(each, name, None) is not None)

        self.befores = with_("before")
        self.afters = with_("after")
        self.arounds = with_("around")[::-1]
        self.backwards = with_("backward")
        self.input_changes = with_("changed_input")
        self.output_changes = with_("changed_output")
        self.input_gradients = with_("input_gradient")
        # Those that change a gradient come first: the others see what it was changed to.
        self.gradients = (*with_("changed_gradient"), *with_("output_gradient"))
        inputs = (*self.befores, *self.input_changes, *self.input_gradients)
        self.counts = bool(inputs or self.afters or self.output_changes or self.gradients)


def _run(
    tap: Tapped,
    plan: _Plan,
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hidden: bool = False,
) -> Any:
    """``inner`` on the arguments, seen by the taps of ``plan``; its output is not, where it is ``hidden``."""
    if not plan.counts:
        return _timed(plan, inner, args, kwargs, hidden)
    recomputing = progress.is_recomputing()
    call = Call(
        tap.module,
        progress.current_microbatch(),
        progress.current_chunk(),
        progress.ordinal(tap, recomputing),
        recomputing,
    )
    for each in plan.input_changes:
        other = each.tell(each.changed_input, call, args, kwargs)
        if other is not None:
            args, kwargs = other
    with_gradients = torch.is_grad_enabled()
    if plan.befores:
        _tell_all(plan.befores, "before", call, (args, kwargs))
    if with_gradients and plan.input_gradients:
        _hook_all(plan.input_gradients, "input_gradient", call, (args, kwargs))
    output = _timed(plan, inner, args, kwargs, hidden)
    if hidden:
        return output
    for each in plan.output_changes:
        other = each.tell(each.changed_output, call, output)
        output = output if other is None else other
    if with_gradients and plan.gradients:
        _hook_all(plan.gradients, "output_gradient", call, output)
    if plan.afters:
        _tell_all(plan.afters, "after", call, (output,))
    return output


def _tell_all(watches: tuple[_ModuleWatch, ...], name: str, call: Call, values: tuple[Any, ...]) -> None:
    seen = None
    # The class torch.no_grad takes ten times as long as what it does.
    with_gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        for each in watches:
            if call.recomputing and not each.recomputed:
                continue
            if each.live:
                each.tell(getattr(each, name), call, *values)
                continue
            if seen is None:
                seen = detached(values)
            each.tell(getattr(each, name), call, *seen)
    finally:
        torch._C._set_grad_enabled(with_gradients)


_HOOKED = "_mt_megatron_taps"


def _hook_all(watches: tuple[_ModuleWatch, ...], name: str, call: Call, values: Any) -> None:
    for index, tensor in enumerate(tensors(values)):
        # A hook on a parameter (tied embeddings are an argument) would outlive the step.
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            continue
        hooked = vars(tensor).setdefault(_HOOKED, set())
        for each in watches:
            if not call.recomputing:
                hooked.add((each, name))
            elif (each, name) in hooked:
                continue  # The first pass had gradients, and got the same tensor.
            if name == "output_gradient" and each.changed_gradient is not None:
                tensor.register_hook(partial(_changed, each, call, index))
            elif not each.closed:
                tensor.register_hook(partial(_arrived, each, getattr(each, name), call, index))


def _arrived(watch: Watch, callback: Gradient, call: Call, index: int, gradient: Tensor) -> None:
    with torch.no_grad():
        watch.tell(callback, call, gradient.detach(), index)


def _changed(watch: _ModuleWatch, call: Call, index: int, gradient: Tensor) -> Tensor | None:
    other: Tensor | None = watch.tell(watch.changed_gradient, call, gradient, index)  # type: ignore[arg-type]
    return other


def _timed(
    plan: _Plan, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hidden: bool
) -> Any:
    """``inner`` within what the taps' ``around`` give, the first opened innermost; backward's moments."""
    marked: list[_ModuleWatch] = []
    if plan.backwards and torch.is_grad_enabled():
        # Both ends of its backward must be seen, or it has none here.
        values = (*args, *kwargs.values()) if kwargs else args
        marked = [each for each in plan.backwards if _mark(each, False, values)]
    if not plan.arounds:
        output = inner(*args, **kwargs)
    else:
        entered = []
        for each in plan.arounds:
            manager = each.tell(_entered, each.around)
            if manager is not None:
                entered.append((each, manager))
        try:
            output = inner(*args, **kwargs)
        except BaseException as error:
            for each, manager in reversed(entered):
                each.leave(manager, type(error), error, error.__traceback__)
            raise
        for each, manager in reversed(entered):
            each.leave(manager, None, None, None)
    if not hidden:
        for each in marked:
            _mark(each, True, output if isinstance(output, tuple | list) else (output,))
    return output


def _entered(around: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    manager = around()
    manager.__enter__()
    return manager


# Moments of backward, without a tensor: before a node of the graph runs. There is one list for each node of
# what begins or ends with it, in forward order, gone through in reverse. Nothing is inserted into the graph.

_KEY = "mt_megatron.taps"


def _mark(watch: Any, begins: bool, values: Any) -> bool:
    """Note the moment at the node that made the first of ``values`` that has one; whether there is one."""
    try:
        node = _node(values)
        if node is None:
            return False
        points = node.metadata.get(_KEY)
        if points is None:
            points = node.metadata[_KEY] = []
            node.register_prehook(_arriving(points))
        points.append((watch, begins))
    except Exception as error:  # noqa: BLE001 - what is raised here, the step would raise
        watch.fail(error)
        return False
    return True


def _arriving(points: list[tuple[Any, bool]]) -> Callable[[Any], None]:
    def arrived(gradients: Any) -> None:
        for watch, begins in reversed(points):
            watch.tell(watch.backward, begins)

    return arrived


def _node(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.grad_fn
    return None


# Structures: tuples (named ones too), lists and dicts, of tensors and whatever else.


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in ``values``, in order."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors(value)


def detached(values: Any) -> Any:
    """``values`` with every tensor detached, memory shared."""
    if isinstance(values, Tensor):
        return values.detach()
    if type(values) in (tuple, list):
        return type(values)(detached(value) for value in values)
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(detached(value) for value in values))
    if isinstance(values, dict):
        return {key: detached(value) for key, value in values.items()}
    return values


def _named(module: nn.Module) -> str:
    number = getattr(module, "layer_number", None)
    name = type(module).__name__
    return name if number is None else f"{name} of layer {number}"

"""Patch this process when it first imports torch or Megatron, as its environment says.

Not earlier: most children of a training run (a tracker of resources, a compiler, a package
manager) never need torch, and a script may set variables that torch reads when it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from mt_megatron._session import MEGATRON_CORE
from mt_megatron.backends.loader_workers import spawned_are_patched
from mt_megatron.errors import MtMegatronError
from mt_megatron.launching.scripts.choice import BACKEND, Choice, Recorded, is_main
from mt_megatron.patching.hooks import ImportHook, is_hook
from mt_megatron.patching.importlib_bootstrap import is_wrapper, unwatch, watch
from mt_megatron.patching.scope import Scope

_NEEDED_BY_MEGATRON_LM = ("six", "regex")
"""Imported by Megatron-LM's tokenizers whatever tokenizer is chosen; Megatron-Core does not need them."""

_NO_ENGINE = (
    "this imports the package transformer_engine itself, which is not installed; only its names in "
    "Megatron-Core are there without it. Leave out the option that asks for it (--tp-comm-overlap, "
    "--fp8-param-gather, --use-legacy-models), or install it"
)


# Tracebacks that end a script do not show the import wrapper and the import hook.


def keep_clean() -> None:
    """From now on an uncaught exception is shown as if imports were not watched."""
    shown = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        said = advice(value)
        clean(value)
        shown(kind, value, value.__traceback__ if trace is not None else None)
        if said is not None:
            print(f"mt-megatron: {said}", file=sys.stderr)

    sys.excepthook = excepthook


def advice(error: BaseException) -> str | None:
    """Advice on an error by which Megatron-LM's own source ends when something optional is absent."""
    if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
        return _NO_ENGINE
    frames = list(_frames(error.__traceback__))
    if not any(str(frame.f_globals.get("__name__")).startswith("megatron.") for frame in frames):
        return None
    if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED_BY_MEGATRON_LM:
        return (
            f"Megatron-LM needs the package {error.name}: pip install 'mt_megatron[megatron-lm]' "
            f"(or pip install {' '.join(_NEEDED_BY_MEGATRON_LM)})"
        )
    return None


def clean(error: BaseException | None) -> None:
    """Take the frames of the wrapper and the hook out of ``error`` and of what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _without_ours(error.__traceback__)
        error = error.__cause__ or error.__context__


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_hook(code):
            # Python hides the frames of its import system up to the module's own, and stops at the hook's.
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                kept.pop()
        elif not is_wrapper(code):
            kept.append(trace)
        trace = trace.tb_next
    for this, following in zip(kept, [*kept[1:], None], strict=True):
        this.tb_next = following
    return kept[0] if kept else None


NAME = "megatron.core.datasets.helpers"


# The compiled dataset helpers of the installed megatron-core, for a source tree that has none. A checkout of
# Megatron-LM holds their C++ source only and compiles it inside of itself. The wheel of the same version has
# them compiled, so a checkout needs neither a compiler nor to be written to.


class DatasetHelpers:
    """The last finder on ``sys.meta_path``: asked when nobody else has the module."""

    def __init__(self, version: str) -> None:
        self._version = version

    def install(self) -> None:
        sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The extension module in the installed distribution, if it is of the right version."""
        if name != NAME:
            return None
        file = self._file()
        return None if file is None else spec_from_file_location(name, file)

    def _file(self) -> Path | None:
        try:
            installed = distribution("megatron-core")
        except PackageNotFoundError:
            return None
        if installed.version != self._version:
            return None
        folder = Path(str(installed.locate_file("megatron/core/datasets")))
        names = (f"helpers{suffix}" for suffix in EXTENSION_SUFFIXES)
        return next((folder / name for name in names if (folder / name).is_file()), None)


# The patches, at the first import of torch or Megatron.


def prepare() -> None:
    """Called once, when the interpreter starts."""
    choice = Choice.of_environment(os.environ)
    if choice is not None:
        keep_clean()
        _Waiting(choice).start()


class _Waiting:
    """Stands on ``sys.meta_path`` until torch is there."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._scope = Scope(choice.modules, choice.folders)
        self._late = False
        self._hook = ImportHook(lambda name: name == "torch", self._torch_imported)

    def start(self) -> None:
        # Where another sitecustomize has imported torch, patching waits for the script's first
        # statement all the same: the script's folder is not on the path before.
        self._late = "torch" in sys.modules
        if not self._late:
            self._hook.install()
        sys.meta_path.insert(0, self)
        # The statement that imports torch is under way when the patches come, so what it returns
        # has to be looked at by somebody who was there before.
        watch(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds nothing; sees to it that torch and the patches come before Megatron."""
        if name == "megatron":
            import torch  # noqa: F401

            if self._late:
                self._activate()
        return None

    def see(
        self, module: ModuleType, names: Mapping[str, Any], wanted: Sequence[str], *, in_function: bool
    ) -> Any:
        """Every module is what it is; the patches' own rebinds come after this one."""
        if self._late and self._scope.covers(names):
            self._activate()
        return module

    def _torch_imported(self, torch: ModuleType) -> None:
        # It has been executed; only the import system does not say so yet.
        if torch.__spec__ is not None:
            torch.__spec__._initializing = False  # type: ignore[attr-defined]
        self._activate()

    def _activate(self) -> None:
        self._late = False
        self._hook.remove()
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        activate(self._choice)
        unwatch(self)


def activate(choice: Choice) -> None:
    """Patch now; a failure ends the process, since nobody can use what is half a backend."""
    import mt_megatron

    DatasetHelpers(MEGATRON_CORE).install()
    spawned_are_patched()
    try:
        found = mt_megatron.patch(choice.backend, scope=(*choice.modules, *choice.folders))
    except MtMegatronError as error:
        _refuse(error)
    try:
        _use_schedule(choice.schedule)
        _use_transport(choice.transport)
        note = _use_products(choice.cpu_bf16_products, mt_megatron.backend().device_type)
        _record(choice.recorded)
    except MtMegatronError as error:
        _refuse(error)
    # ``auto`` is settled once, for all processes.
    os.environ[BACKEND] = found.backend
    if found.backend != "cuda":
        # Megatron-LM refuses to start without it; only the CUDA driver reads it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if is_main(os.environ) and os.environ.get("RANK", "0") == "0":
        print(f"mt-megatron: {found.summary()}", file=sys.stderr, flush=True)
        if note is not None:
            print(f"mt-megatron: {note}", file=sys.stderr, flush=True)


def _use_schedule(text: str | None) -> None:
    if text is None:
        return
    from mt_megatron.parallel import stage_order
    from mt_megatron.pipeline.choice import parse
    from mt_megatron.pipeline.execute.source import set_pipeline_schedule

    chosen = parse(text)
    stage_order.use_v(chosen.is_v)
    set_pipeline_schedule(chosen.for_any_layout())


def _use_transport(text: str | None) -> None:
    if text is None:
        return
    from mt_megatron.comm.choice import choose

    choose(text)


def _use_products(name: str | None, device_type: str) -> str | None:
    """The line about it, if any."""
    if name is None:
        return None
    from mt_megatron.seams import widened

    widened.choose(name)
    return widened.note(name, device_type)


def _record(asked: Recorded | None) -> None:
    if asked is None:
        return
    from mt_megatron.launching.scripts.recording import record

    record(asked)


def _refuse(error: MtMegatronError) -> NoReturn:
    print(f"mt-megatron: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)

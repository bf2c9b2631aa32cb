"""Traces the touch points of megatron.training in a process of the gate, from its first import on."""

import atexit
import json
import os
import sys
import types
from pathlib import Path

from tests.coverage_gate.points import list_points
from tests.coverage_gate.tracer import Tracer


class _Start:
    """A finder that finds nothing; tracing earlier would slow torch's import down."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "megatron.training":
            sys.meta_path.remove(self)
            self._tracer.start()


class _Writer:
    """Stands in for tensorboard's writer, a package of its own: takes what it is given."""

    def __init__(self, **options: object) -> None:
        self.options = options

    def __getattr__(self, name: str) -> object:
        if name != "flush" and not name.startswith("add_"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def _begin() -> None:
    case, root, folder = (os.environ[f"MT_MEGATRON_GATE_{name}"] for name in ("CASE", "ROOT", "RECORDS"))
    tracer = Tracer(Path(root), list_points(Path(root)))
    sys.meta_path.insert(0, _Start(tracer))
    sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=_Writer)

    def write() -> None:
        tracer.stop()
        executed = sorted(set().union(*tracer.records.values()))
        record = {"test": case, "points": executed}
        (Path(folder) / f"{case}.{os.getpid()}.json").write_text(json.dumps(record))

    atexit.register(write)


if "RANK" in os.environ and "MT_MEGATRON_BACKEND" in os.environ:
    _begin()

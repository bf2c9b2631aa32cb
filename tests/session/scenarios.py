"""What the session tests do in processes of their own: each scenario prints one JSON object."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CONSUMERS = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.inference.communication_utils",
)
"""Between them they bind nearly everything that is patched."""


def run_scenario(name: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run ``name`` in a fresh interpreter and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    from tests.launch import run_command  # not at the top: a scenario imports nothing else

    done = run_command(
        [sys.executable, "-m", "tests.session.scenarios", name, *arguments],
        cwd=ROOT,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def load(names: tuple[str, ...] = CONSUMERS) -> None:
    for name in names:
        importlib.import_module(name)


def modules(*packages: str) -> Iterator[types.ModuleType]:
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] in packages and isinstance(module, types.ModuleType):
            yield module


def attributes(*packages: str) -> dict[str, int]:
    """Identity of every name of every module and class, of functions' code and default arguments.

    Ids and not the objects: a snapshot that held them would be a holder, and be rebound itself."""
    found: dict[str, int] = {}
    for module in modules(*packages):
        owners: dict[str, Any] = {module.__name__: module}
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                owners[f"{module.__name__}:{name}"] = value
        for path, owner in owners.items():
            for name, value in list(vars(owner).items()):
                found[f"{path}.{name}"] = id(value)
                function = unwrapped(value)
                if isinstance(function, types.FunctionType):
                    found[f"{path}.{name}.__code__"] = id(function.__code__)
                    found[f"{path}.{name}.__defaults__"] = id(function.__defaults__)
    return found


def unwrapped(value: Any) -> Any:
    # Not getattr on whatever it is: some of torch's module attributes initialise CUDA.
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def difference(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return sorted(name for name in before if after.get(name) != before[name])


def originals(report: Any) -> dict[int, str]:
    """Ids of what was at the wrapped and replaced targets of modules that are imported, before."""
    found: dict[int, str] = {}
    for record in report:
        module, _, qualname = record.target.partition(":")
        if record.kind not in ("wrap", "replace") or module not in sys.modules:
            continue
        *outer, name = qualname.split(".")
        owner: Any = sys.modules[module]
        for part in outer:
            owner = getattr(owner, part)
        raw = vars(owner)[name]
        found[id(unwrapped(raw))] = record.target
    return found


def holders_of(wanted: dict[int, str]) -> list[str]:
    """Everything in the process, other than the engine and its wrappers, that holds an original."""
    found: list[str] = []
    own = {"mt_megatron"}
    for holder in gc.get_objects():
        if isinstance(holder, dict) and "__wrapped__" in holder and len(holder) <= 2:
            continue  # a wrapper's own attributes
        module = str(type(holder).__module__).partition(".")[0]
        # A staticmethod that anybody but the journal still had would be a name in some class.
        if module in own or isinstance(holder, (types.CellType, types.FrameType, staticmethod, classmethod)):
            continue
        for value in gc.get_referents(holder):
            if id(value) in wanted and isinstance(value, types.FunctionType):
                found.append(f"{wanted[id(value)]} in {type(holder).__name__}")
    return found


def order(what: str) -> dict[str, Any]:
    """Import ``what`` share of the consumers, patch, import the rest, unpatch; twice."""
    import mt_megatron
    from mt_megatron.errors import PatchError

    load({"nothing": (), "half": CONSUMERS[::2], "everything": CONSUMERS}[what])
    finders = list(sys.meta_path)
    result: dict[str, Any] = {}
    from mt_megatron.backends.registry import select
    from mt_megatron.patches import collect

    declared = collect(select("cpu")[0])
    before = attributes("torch", "megatron", "numpy")
    kept = originals(declared)
    first = mt_megatron.patch("cpu")
    result["warnings"] = list(first.warnings)
    load()
    report = mt_megatron.report()
    result["pending"] = [record.id for record in report.pending]
    result["applied"] = len(report.applied)
    result["unrebindable"] = list(report.unrebindable)
    result["holders"] = holders_of(kept)
    result["kept"] = len(kept)
    patched = attributes("torch", "megatron", "numpy")
    result["changed"] = len(difference(before, patched))
    result["again is a no-op"] = (
        mt_megatron.patch("cpu") == report and attributes("torch", "megatron", "numpy") == patched
    )
    for arguments in ({"backend": "cuda"}, {"backend": "cpu", "features": ["compat"]}):
        try:
            mt_megatron.patch(**arguments)  # type: ignore[arg-type]
        except PatchError as error:
            result.setdefault("on top", []).append(str(error))
    mt_megatron.unpatch()
    result["finders are back"] = sys.meta_path == finders
    result["not restored"] = difference(before, attributes("torch", "megatron", "numpy"))
    # Now everything is imported: from here on a second round has to be exact for all of it.
    before, kept = attributes("torch", "megatron", "numpy"), originals(declared)
    with mt_megatron.patched("cpu") as report:
        result["second round"] = len(report.applied)
        result["holders of the second round"] = holders_of(kept)
        result["rebound"] = sum(len(record.rebound) for record in report.patches)
    result["not restored by the second round"] = difference(before, attributes("torch", "megatron", "numpy"))
    result["left behind"] = left_behind()
    result["judged"], result["taken for changed"] = changed_targets()
    return result


def changed_targets() -> tuple[int, list[str]]:
    """How many targets of all backends were looked at, and what is taken for somebody's change of one, though
    nobody has made any."""
    from mt_megatron._session import make_plan_for
    from mt_megatron.backends import registry
    from mt_megatron.patching.engine import _target
    from mt_megatron.patching.prior_changes import prior_change

    steps: dict[str, Any] = {}
    for name in ("cpu", "cuda", "musa"):
        steps.update((step.patch.target, step) for step in make_plan_for(registry.get(name), "").steps)
    judged, found = 0, []
    for target, step in steps.items():
        if step.patch.kind not in ("wrap", "replace", "constant") or step.patch.digest is None:
            continue
        try:
            importlib.import_module(step.module)
        except (ImportError, NameError):  # for want of mamba_ssm, zarr or Transformer Engine
            continue
        change = prior_change(step, _target(step))
        judged += 1
        found += [] if change is None else [f"{target} {change}"]
    return judged, found


def scoped(folder: str, early: str) -> dict[str, Any]:
    """Patch with a folder and a name in scope, import the rest of the modules in it, unpatch."""
    import builtins

    import mt_megatron
    from mt_megatron.errors import PatchError

    sys.path[:0] = [folder, f"{folder}/venv/site-packages"]
    for name in ("one", "package.two", "installed"):
        text = (
            "import torch, torch.distributed as dist\nfrom torch import zeros, cuda\n"
            "from torch.cuda import is_available\nclass Holder:\n    torch = torch\n"
            "def inner(device=torch.device):\n    import torch\n"
            "    from torch.cuda import is_available\n    return is_available(), torch.ones(1).is_cuda\n"
        )
        path = Path(folder, "venv/site-packages" if name == "installed" else "", *name.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    names = ("one", "package.two", "installed")
    importer, finders = builtins.__import__, list(sys.meta_path)
    load(names if early == "everything" else ())
    before = attributes("torch", *(name.partition(".")[0] for name in names))
    request = {"scope": [Path(folder), "package"]}
    report = mt_megatron.patch("cpu", **request)  # type: ignore[arg-type]
    load(names)
    found: dict[str, Any] = {"seen": {}, "again": []}
    for name in names:
        module = sys.modules[name]
        told = [
            module.torch.cuda.is_available(),
            module.cuda.is_available(),
            module.Holder.torch is module.torch,
        ]
        found["seen"][name] = [*told, module.dist.new_group is sys.modules["torch"].distributed.new_group]
        found["seen"][name] += module.inner()
    for asked in (request, {}, {"scope": ["package"]}):
        try:
            found["again"].append(mt_megatron.patch("cpu", **asked).plan_digest == report.plan_digest)  # type: ignore[arg-type]
        except PatchError as error:
            found["again"].append(str(error))
    mt_megatron.unpatch()
    torch = sys.modules["torch"]
    found["importer is back"] = builtins.__import__ is importer and sys.meta_path == finders
    found["originals"] = [
        getattr(sys.modules[name], at) is value
        for name in names
        for at, value in {
            "torch": torch, "dist": torch.distributed, "zeros": torch.zeros, "cuda": torch.cuda,
            "is_available": torch.cuda.is_available,
        }.items()
    ] + [sys.modules[name].Holder.torch is torch for name in names]  # fmt: skip
    found["defaults"] = [sys.modules[name].inner.__defaults__ == (torch.device,) for name in names]
    found["honest"] = [list(sys.modules[name].inner()) for name in names]
    if early == "everything":
        kept = attributes("torch", *(name.partition(".")[0] for name in names))
        found["not restored"] = difference(before, kept)
    return found


def left_behind() -> list[str]:
    """Functions and modules of mt_megatron that Megatron or torch still refer to."""
    found: list[str] = []
    for module in modules("torch", "megatron"):
        owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                function = unwrapped(value)
                ours = (
                    isinstance(function, types.FunctionType)
                    and f"{os.sep}mt_megatron{os.sep}" in function.__code__.co_filename
                )
                ours = ours or str(type(value).__module__).partition(".")[0] == "mt_megatron"
                if ours:
                    found.append(f"{module.__name__}.{name}")
    return found


def importing() -> dict[str, Any]:
    """What importing the package alone does."""
    finders, before = list(sys.meta_path), set(sys.modules)
    import mt_megatron

    return {
        "finders": sys.meta_path == finders,
        "heavy": sorted(
            {name.partition(".")[0] for name in set(sys.modules) - before}
            & {"torch", "megatron", "numpy", "torch_musa", "transformer_engine", "apex", "packaging"}
        ),
        "public": sorted(mt_megatron.__all__),
    }


def plan_of(backend: str) -> dict[str, Any]:
    """Plan (not commit), and say what came of it and whether Megatron was imported."""
    import mt_megatron
    from mt_megatron.errors import MtMegatronError

    try:
        report = mt_megatron.patch(backend)
    except MtMegatronError as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "megatron": [name for name in sys.modules if name.startswith("megatron")],
        }
    found = {"warnings": list(report.warnings), "json": json.loads(report.to_json())["warnings"]}
    mt_megatron.unpatch()
    return found


def logging_of(level: str) -> dict[str, Any]:
    """The lines that ``patch`` and a second ``patch`` log on this rank."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger("mt_megatron")
    logger.setLevel(level)
    logger.addHandler(Keep())
    import mt_megatron

    mt_megatron.patch("cpu")
    mt_megatron.patch("cpu")
    return {"lines": lines}


def single_process() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def save(folder: str) -> dict[str, Any]:
    """Write a model's weights, patched, in the three ways that people write them."""
    single_process()
    from tests.patches import small_gpt

    small_gpt.start()
    import pickle

    import torch
    from megatron.core import dist_checkpointing

    config = small_gpt.transformer_config()
    model = small_gpt.build(config)
    weights = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    torch.save(weights, Path(folder, "weights.pt"))
    # Upstream's own initialisers cannot be pickled, patched or not.
    config.init_method = config.output_layer_init_method = None
    (Path(folder) / "config.pickle").write_bytes(pickle.dumps(config))
    (Path(folder) / "sharded").mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(Path(folder, "sharded")))
    return {name: checksum(value) for name, value in weights.items()}


def checksum(tensor: Any) -> list[float]:
    return [tensor.double().sum().item(), tensor.double().abs().sum().item()]


def read(folder: str) -> dict[str, Any]:
    """Read them where mt_megatron cannot be imported."""
    sys.modules["mt_megatron"] = None  # type: ignore[assignment]
    single_process()
    import pickle

    import torch
    from megatron.core import dist_checkpointing

    weights = torch.load(Path(folder, "weights.pt"), weights_only=True)
    config = pickle.loads((Path(folder) / "config.pickle").read_bytes())
    sharded = dist_checkpointing.load_plain_tensors(str(Path(folder, "sharded")))
    return {
        "weights": {name: checksum(value) for name, value in weights.items()},
        "config": [type(config).__module__, config.num_layers],
        "sharded": {name: checksum(value) for name, value in sharded.items() if torch.is_tensor(value)},
    }


def workers(method: str) -> dict[str, Any]:
    """Whether data-loader workers see the patches."""
    import mt_megatron

    mt_megatron.patch("cpu")
    from torch.utils.data import DataLoader

    load(("megatron.core.parallel_state",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(Probe(), batch_size=None, num_workers=1, multiprocessing_context=method)
        return {"wrapped": [bool(value) for value in loader]}


class Probe:
    """A data set whose only item says whether this process is patched."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        from megatron.core import parallel_state

        return int(hasattr(parallel_state.destroy_model_parallel, "__wrapped__"))


def compare(features_of_last: list[str]) -> str:
    """In each rank: patch, on the last rank with other features, and compare the plans."""
    import torch.distributed as dist

    import mt_megatron
    from mt_megatron.backends.distributed.namespace import let_group_threads_rest
    from mt_megatron.errors import PatchError

    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    mt_megatron.patch("cpu", features=features_of_last or None if last else None)
    try:
        mt_megatron.compare_plan_across_ranks()
        return "same"
    except PatchError as error:
        return str(error)
    finally:
        let_group_threads_rest()
        dist.destroy_process_group()


SCENARIOS = {
    "order": order,
    "scoped": scoped,
    "importing": importing,
    "plan_of": plan_of,
    "logging_of": logging_of,
    "save": save,
    "read": read,
    "workers": workers,
}

if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = SCENARIOS[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
    print(json.dumps(outcome))
    import torch.distributed as dist

    # A group that is left behind ends with the interpreter, whose order may abort its threads.
    if dist.is_initialized():
        dist.destroy_process_group()

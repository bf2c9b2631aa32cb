"""The musa backend calls listed names of torch_musa alone, and the emulator offers those and no others."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.emulators import SURFACE, environment, needs_emulated_musa
from tests.launch import run_command

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "mt_megatron" / "backends" / "musa").glob("*.py"))
ALSO_THERE = {"torch.musa.default_generators", "torch.musa.amp", "torch.musa.mccl"}
"""What the head of the list names in words."""


def _listed() -> dict[str, str]:
    """Dotted name -> what stands in its parentheses; classes have ``class``."""
    found = {}
    for line in SURFACE.read_text(encoding="utf-8").splitlines():
        match = re.match(r"(torch(?:\.musa|_musa)\.[\w.]+)(?:\((.*)\)|\s+(class))$", line)
        if match:
            found[match[1]] = match[3] or match[2]
        else:
            assert line.startswith("#") or not line, line
    return found


def _used(source: str) -> set[str]:
    """Names below ``torch.musa`` and ``torch_musa`` that Python source looks up, chains whole."""
    tree = ast.parse(source)
    chains = set()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            chains.add(ast.unparse(node))
    found = set()
    for chain in chains:
        for prefix, meaning in (
            ("_musa().", "torch.musa."),
            ("musa.", "torch.musa."),
            ("torch.musa.", "torch.musa."),
        ):
            if chain.startswith(prefix):
                found.add(meaning + chain.removeprefix(prefix))
        if chain.startswith("torch_musa."):
            found.add(chain)
    return found


def _unlisted(used: set[str], listed: set[str]) -> set[str]:
    # A chain may go on into the value: properties of a device, methods of an optimizer.
    return {
        name for name in used if not any(name == each or name.startswith(each + "().") for each in listed)
    }


def _all_listed() -> set[str]:
    return {*_listed(), *ALSO_THERE}


def test_the_backend_uses_listed_names_only() -> None:
    used = set().union(*(_used(path.read_text(encoding="utf-8")) for path in SOURCES))
    calls = {re.sub(r"\(.*", "", name) for name in used}
    assert len(calls) > 60, sorted(calls)
    assert not _unlisted(calls, _all_listed())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x = _musa().nvtx", "torch.musa.nvtx"),
        ("musa.utilization(0)", "torch.musa.utilization"),
        ("torch_musa.optim.FusedSGD(p)", "torch_musa.optim.FusedSGD"),
    ],
)
def test_an_unlisted_name_is_noticed(source: str, name: str) -> None:
    assert _unlisted(_used(source), _all_listed()) == {name}


_DUMP = """
import inspect, json, types, torch, torch_musa
def parameters(value):
    try:
        all = inspect.signature(value).parameters.values()
        return [[p.name, p.kind.name, p.default is not p.empty] for p in all]
    except (TypeError, ValueError):
        return None
found = {}
def look(prefix, holder):
    for name, value in vars(holder).items():
        if name.startswith("__") and name != "__init__":
            continue
        found[f"{prefix}.{name}"] = ["class" if isinstance(value, type) else "other", parameters(value)]
        if isinstance(value, type):
            look(f"{prefix}.{name}", value)
torch.musa._lazy_init()
look("torch.musa", torch.musa)
look("torch.musa.amp", torch.musa.amp)
look("torch.musa.mccl", torch.musa.mccl)
for name in ("FusedAdam", "FusedAdamW", "FusedLAMB"):
    found[f"torch_musa.optim.{name}"] = ["class", None]
    for method in ("__init__", "step", "zero_grad", "load_state_dict"):
        if hasattr(getattr(torch_musa.optim, name), method):
            value = getattr(getattr(torch_musa.optim, name), method)
            found[f"torch_musa.optim.{name}.{method}"] = ["other", parameters(value)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def offered() -> dict[str, list[object]]:
    done = run_command(
        [sys.executable, "-W", "ignore", "-c", _DUMP],
        env={**os.environ, **environment()},
        timeout=120,
        check=True,
    )
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@needs_emulated_musa()
def test_the_emulator_offers_all_of_the_list(offered: dict[str, list[object]]) -> None:
    missing = []
    for name in _listed():
        base = re.sub(r"\.__new__$|\.__init__$", "", name)
        if name not in offered and not (base != name and base in offered):
            missing.append(name)
    assert not missing


@needs_emulated_musa()
def test_the_emulator_offers_nothing_else(offered: dict[str, list[object]]) -> None:
    listed = _all_listed()
    # torch asks the module of any PrivateUse1 device for this one; it is no part of the vendor's surface.
    expected = {*listed, "torch.musa._is_in_bad_fork"}
    inside = {"_take", "_timed", "_waited", "_pending", "device", "__init__"}
    extra = {
        name
        for name in offered
        if name not in expected
        and not name.startswith(
            ("torch_musa.optim.", "torch.musa.amp.autocast.", "torch.musa.amp.GradScaler.")
        )
        and not (name.count(".") > 2 and name.rpartition(".")[2] in inside)
    }
    assert not extra


@needs_emulated_musa()
def test_the_emulators_functions_take_what_is_listed(offered: dict[str, list[object]]) -> None:
    compared = 0
    for name, arguments in _listed().items():
        kind, parameters = offered.get(name, ["", None])
        if kind != "other" or not isinstance(parameters, list) or arguments == "class":
            continue
        given = [[p[0], p[1], p[2]] for p in parameters]
        if [p[1] for p in given] == ["VAR_POSITIONAL", "VAR_KEYWORD"]:
            continue  # refuses whatever it is given
        wanted = []
        for each in filter(None, arguments.split(", ")):
            if each not in ("*", "*args", "**kwargs"):
                wanted.append((each.partition("=")[0], "=" in each))
        if wanted and wanted[0][0] == "cls":
            wanted = wanted[1:]
        ours = [(p[0], p[2]) for p in given if not str(p[1]).startswith("VAR_")]
        assert ours == wanted, name
        compared += 1
    assert compared > 70


def test_the_list_is_read_whole() -> None:
    listed = _listed()
    lines = SURFACE.read_text(encoding="utf-8").splitlines()
    assert len(listed) == sum(line.startswith("torch") for line in lines) > 100
    assert listed["torch.musa.set_device"] == "device" and listed["torch.musa.Event"] == "class"

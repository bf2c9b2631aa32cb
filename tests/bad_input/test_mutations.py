"""Negative control: with any one check taken out, some wrong configuration is no longer found as it was."""

from __future__ import annotations

import ast
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.errors import ConfigError
from mt_megatron.planning.validate import environment as validate_environment
from mt_megatron.planning.validate import experts as validate_experts
from mt_megatron.planning.validate import files as validate_files
from mt_megatron.planning.validate import model as validate_model
from mt_megatron.planning.validate import parallel as validate_parallel
from mt_megatron.planning.validate import rampup as validate_rampup
from mt_megatron.planning.validate import schedule as validate_schedule
from mt_megatron.planning.validate import supported as validate_supported
from mt_megatron.planning.validate import train as validate_train
from mt_megatron.scope.sidecar.sinks import base as sinks
from mt_megatron.training import validate as validate_watching
from tests.bad_input.cases import loaded, valid_case
from tests.bad_input.rules import all_rules
from tests.bad_input.test_files import DAMAGES, FLAGS, tokenizer_file, write_data
from tests.config.test_validate import WRONG
from tests.config.test_validate import config as handmade

RULES = all_rules()
Check = Callable[[ModuleType, TrainingConfig, int], list[str]]
CHECKS: dict[ModuleType, Check] = {
    validate_files: lambda module, config, world: [
        *module.file_problems(config),
        *module.checkpoint_problems(config),
    ],
    validate_experts: lambda module, config, world: module.expert_problems(config, world),
    validate_model: lambda module, config, world: module.model_problems(config),
    # Nodes of three processes divide by no tensor-parallel size above 1 but 3.
    validate_parallel: lambda module, config, world: [
        *module.parallel_problems(config, world),
        *module.pipeline_problems(config),
        *module.node_problems(config, 12, 3),
    ],
    validate_rampup: lambda module, config, world: module.rampup_problems(config, world),
    validate_schedule: lambda module, config, world: [
        *module.schedule_problems(config, 4),
        *module.transport_problems(config),
    ],
    validate_watching: lambda module, config, world: [
        *module.scan_problems(config),
        *module.scope_problems(config),
    ],
    validate_supported: lambda module, config, world: [
        *module.size_problems(config),
        *module.support_problems(config),
        *module.backend_problems(config),
    ],
    validate_train: lambda module, config, world: module.train_problems(config),
}


class Without(ast.NodeTransformer):
    """Takes out the problem at one line: an ``append`` does nothing, a returned line is left out."""

    def __init__(self, line: int) -> None:
        self.line = line

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if node.lineno == self.line and is_append(node):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.lineno == self.line and returned(node) is not None:
            lists = [each for each in ast.walk(node) if isinstance(each, ast.List) and is_text(each)]
            lists[0].elts = []
        return node


def is_append(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "append"
        and ast.unparse(node.value.func.value) == "found"
    )


def is_text(node: ast.List) -> bool:
    return len(node.elts) == 1 and isinstance(node.elts[0], ast.JoinedStr | ast.Constant | ast.BinOp)


def returned(node: ast.AST) -> ast.List | None:
    """The one line of text that a ``return`` gives, alone or after others."""
    if not isinstance(node, ast.Return) or node.value is None:
        return None
    lists = [each for each in ast.walk(node.value) if isinstance(each, ast.List) and is_text(each)]
    return lists[0] if len(lists) == 1 else None


def sites(module: ModuleType) -> Iterator[int]:
    """The lines of ``module`` that name a problem."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if is_append(node) or returned(node) is not None:
            yield node.lineno  # type: ignore[attr-defined]


def mutant(module: ModuleType, line: int) -> ModuleType:
    """``module`` without the problem at ``line``."""
    tree = Without(line).visit(ast.parse(Path(str(module.__file__)).read_text()))
    made = ModuleType(module.__name__)
    made.__dict__["__file__"] = module.__file__
    exec(compile(ast.fix_missing_locations(tree), f"<without line {line}>", "exec"), made.__dict__)
    return made


@pytest.fixture(scope="module")
def wrong() -> Iterator[list[tuple[TrainingConfig, int]]]:
    """Wrong configurations of every kind: the list made by hand, each rule, each damaged file."""
    found = [(handmade(extra), world) for extra, world, _ in WRONG]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rule in RULES.values():
            for seed in range(8):
                rng = Random(seed)
                case = valid_case(rng)
                rule(case, rng)
                try:
                    found.append((loaded(case, folder, rng), case.world))
                except ConfigError:
                    break
        found.extend((config, 1) for config in with_files(folder))
        with pytest.MonkeyPatch.context() as patch:
            access, find = os.access, importlib.util.find_spec
            patch.setattr(os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
            for holder in (importlib.util, sinks):
                patch.setattr(
                    holder,
                    "find_spec",
                    lambda name: None if name in ("wandb", "transformer_engine") else find(name),
                )
            yield found


def with_files(folder: Path) -> Iterator[TrainingConfig]:
    for name, damage in DAMAGES.items():
        write_data(folder / name, Random(1))
        damage(folder / f"{name}.bin", folder / f"{name}.idx", Random(1))
        yield load_config([*FLAGS.split(), "--train-data-path", str(folder / name)])
    write_data(folder / "short", Random(1), sequences=1)
    short = ["--valid-data-path", str(folder / "short"), "--seq-length", "512"]
    yield load_config([*FLAGS.split(), "--train-data-path", str(folder / "short"), *short])
    tokenizer_file(folder / "small.json", 300)
    (folder / "none.json").write_text("{}")
    for file in ("small.json", "none.json"):
        flags = ["--mock-data", "--vocab-size", "none", "--tokenizer-type", "HuggingFaceTokenizer"]
        yield load_config([*FLAGS.split(), *flags, "--tokenizer-model", str(folder / file)])
    (folder / "file").write_text("")
    yield load_config([*FLAGS.split(), "--mock-data", "--save", str(folder / "file")])
    yield load_config([*FLAGS.split(), "--mock-data", "--metrics-path", str(folder)])
    # The fixture makes this folder unwritable and these packages absent, whoever runs the tests.
    (folder / "locked").mkdir()
    yield load_config([*FLAGS.split(), "--mock-data", "--save", str(folder / "locked")])
    yield load_config([*FLAGS.split(), "--mock-data", "--wandb-project", "p"])
    yield load_config(
        [*FLAGS.split(), "--mock-data", "--save", str(folder / "saved"), "--scope-sink", "wandb"]
    )
    yield load_config([*FLAGS.split(), "--mock-data", "--backend", "nowhere"])
    yield load_config([*FLAGS.split(), "--mock-data", "--peak-tflops", "0"])
    yield load_config([*FLAGS.split(), "--mock-data", "--min-loss-scale", "0"])
    yield load_config([*FLAGS.split(), "--mock-data", "--transformer-impl", "transformer_engine"])


def lines_of(check: Check, module: ModuleType, config: TrainingConfig, world: int) -> list[str]:
    """What the checks say; what they crash with when the first of them let something pass."""
    if not module.__name__.endswith("supported") and validate_supported.size_problems(config):
        return []  # Nothing else is asked then: the numbers are too large to compute with.
    try:
        return check(module, config, world)
    except ArithmeticError as error:
        return [repr(error)]


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_check_is_needed(module: ModuleType, wrong: list[tuple[TrainingConfig, int]]) -> None:
    check = CHECKS[module]
    complete = [lines_of(check, module, config, world) for config, world in wrong]
    lines = list(sites(module))
    assert lines, "the control found something to take out"
    survivors = []
    for line in lines:
        without = mutant(module, line)
        if all(
            lines_of(check, without, config, world) == before
            for (config, world), before in zip(wrong, complete, strict=True)
            if before
        ):
            survivors.append(line)
    assert not survivors, f"{module.__file__}: nothing notices when these lines are gone: {survivors}"


def test_the_environment_checks_are_needed() -> None:
    from tests.bad_input.test_command_line import environment, test_variables_that_contradict

    (mark,) = (m for m in test_variables_that_contradict.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    cases: list[dict[str, Any]] = [environment(**changed) for changed, *_ in mark.args[1]]
    complete = [validate_environment.environment_problems(each) for each in cases]
    assert all(complete)
    for line in sites(validate_environment):
        without = mutant(validate_environment, line)
        assert [without.environment_problems(each) for each in cases] != complete, line


def test_the_control_itself_can_fail(wrong: list[tuple[TrainingConfig, int]]) -> None:
    """A check that no example touches would be reported: with no examples at all, every line is."""
    line = next(sites(validate_parallel))
    assert mutant(validate_parallel, line).parallel_problems(
        *wrong[0]
    ) == validate_parallel.parallel_problems(*wrong[0])

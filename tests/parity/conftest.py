"""Parity runs, each group of equal world size started once, also where several workers run the tests."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.emulators import environment
from tests.launch import run_ranks
from tests.parity.case import DROPOUT, LAYOUTS, MIXTURES, REFERENCES, SABOTAGED, Layout
from tests.parity.compare import Record, read_record
from tests.parity.run import record_folder

CI_SEEDS = (1234,)
SOAK_SEEDS = (1234, 7, 99)

Runs = Callable[..., Record]
Figures = Callable[[Mapping[str, float]], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every parity test runs for one seed, and under ``--soak`` for the others as well."""
    if "seed" in metafunc.fixturenames:
        extra = [pytest.param(seed, marks=pytest.mark.soak) for seed in SOAK_SEEDS if seed not in CI_SEEDS]
        metafunc.parametrize("seed", [*CI_SEEDS, *extra])


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    """``runs(name, seed=..., bf16=..., backend=..., peers=...)``: the record of a layout, run together with
    its peers (by default all layouts of its world size) from the weights that the first reference had."""
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        # The folder of all workers of pytest-xdist.
        shared = shared.parent
    records: dict[tuple[str, int, bool, str], Record] = {}

    def start(layouts: list[Layout], world: int, seed: int, bf16: bool, backend: str) -> None:
        folder = shared / "parity" / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            # Another worker that needs the same waits for what this one starts.
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = folder / record_folder(bf16, backend)
            missing = [layout for layout in layouts if not (done / layout.name / "results.json").exists()]
            if missing:
                launch(missing, world, folder, seed, bf16, backend)
        for layout in layouts:
            where = done / layout.name
            results = json.loads((where / "results.json").read_text())
            records[layout.name, seed, bf16, backend] = read_record(where, results)

    def launch(layouts: list[Layout], world: int, folder: Path, seed: int, bf16: bool, backend: str) -> None:
        names = [layout.name for layout in layouts]
        # The backend's name for the CPU would be an environment of its own, which no warm interpreter has.
        emulated = environment() if backend == "musa" else {}
        variables = emulated if backend == "cpu" else {"MT_MEGATRON_TEST_BACKEND": backend, **emulated}
        results = run_ranks(
            world,
            "tests.parity.run:run_layouts",
            names,
            str(folder),
            seed,
            bf16,
            timeout=120 + 60 * len(names),
            env=variables,
        )
        for name in names:
            where = folder / record_folder(bf16, backend) / name
            (where / "results.json").write_text(json.dumps([result[name] for result in results]))

    def get(
        name: str, *, seed: int, bf16: bool = False, backend: str = "cpu", peers: Sequence[str] | None = None
    ) -> Record:
        every = (*LAYOUTS, *MIXTURES, *DROPOUT, *SABOTAGED)
        # Where rounding chooses other experts, trainings part.
        every = tuple(each for each in every if not (bf16 and each.mixture))
        everything = not bf16 or os.environ.get("MT_MEGATRON_SOAK") == "1"
        wanted = [each for each in every if everything or each.bf16_always or each.name == name]
        compared = {"one", *(each.reference for each in wanted)}
        references = [each for each in REFERENCES if not bf16 or each.name in compared]
        if ("one", seed, bf16, "cpu") not in records:
            start([*references, *(each for each in wanted if each.world == 1)], 1, seed, bf16, "cpu")
        if (name, seed, bf16, backend) not in records:
            if peers is not None:
                wanted = [each for each in (*REFERENCES, *every) if each.name in {*peers, name}]
            world = next(each.world for each in wanted if each.name == name)
            missing = [
                each
                for each in wanted
                if each.world == world and (each.name, seed, bf16, backend) not in records
            ]
            start(missing, world, seed, bf16, backend)
        return records[name, seed, bf16, backend]

    return get


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Figures:
    """Report the measured values of a test; the record of a ``--soak`` run keeps them."""

    def report(values: Mapping[str, float]) -> None:
        for name, value in values.items():
            record_property(name, value)

    return report

"""Which tests run: the second lane only with ``--all`` or ``--soak``, acceptance volumes only with
``--soak``, device tests only on their backend."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from typing import Any

import hypothesis
import pytest

from tests import index_cache, tolerances
from tests.fork_server import FOLDER, installed_here, new_folder
from tests.soak import SoakReport


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Conftests of folders that are named are imported next, before options are known, and with them tables
    # of cases, which read these.
    given = {
        *pluginmanager.get_plugin("pytestconfig").invocation_params.args,
        *os.environ.get("PYTEST_ADDOPTS", "").split(),
    }
    if given & {"--all", "--soak"}:
        os.environ["MT_MEGATRON_DAILY"] = "1"
    if "--soak" in given:
        os.environ["MT_MEGATRON_SOAK"] = "1"
    group = parser.getgroup("mt_megatron")
    group.addoption("--all", action="store_true", help="also run tests marked daily: the second lane")
    group.addoption(
        "--soak", action="store_true", help="also run acceptance volumes, and write results/soak-*"
    )
    group.addoption(
        "--soak-record",
        metavar="NAME",
        help="with --soak: write results/NAME.json and .md after every test, and leave out tests that passed "
        "in it with the same sources",
    )
    group.addoption("--backend", default="cpu", help="run tests marked backend(NAME) of this name too (cpu)")


# A deadline measures the machine: beside other work a first example takes longer than the later ones.
hypothesis.settings.register_profile("first lane", deadline=None, max_examples=30)
hypothesis.settings.register_profile("second lane", deadline=None, max_examples=100)
hypothesis.settings.load_profile("first lane")


def pytest_configure(config: pytest.Config) -> None:
    # As in run.sh: tests start many processes, and a fork server must not have threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not installed_here():
        # The interpreter's mt_megatron is another checkout's: processes that tests start must find this one.
        path = [str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if FOLDER not in os.environ:  # which workers inherit
        os.environ[FOLDER] = str(new_folder())
        config.add_cleanup(_leave_servers)
    tolerances.install()
    config.addinivalue_line("markers", "daily: proves the port and hardly ever fails, only run with --all")
    config.addinivalue_line("markers", "soak: acceptance volumes, only run with --soak")
    config.addinivalue_line("markers", "backend(name): needs this backend's device, only run with --backend")
    if config.getoption("--all") or config.getoption("--soak"):
        hypothesis.settings.load_profile("second lane")
    if config.getoption("--soak"):
        name = config.getoption("--soak-record")
        report = SoakReport(config, name=name) if name else SoakReport(config)
        config.pluginmanager.register(report, "soak-report")


def _leave_servers() -> None:
    shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _index_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ[index_cache.FOLDER] = str(tmp_path_factory.mktemp("index_cache"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.together import FilesScheduling

    return FilesScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker import another part of all test files first: what they compile, which takes as long as
    all the rest of collecting, is there for the others when they come to it."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = session.config.rootpath
    files = sorted(root.glob("tests/**/test_*.py"))
    for path in files[int(worker["workerid"][2:]) :: worker["workercount"]]:
        # Collecting imports again what fails, and reports it.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


UNKNOWN = pytest.StashKey[list[str]]()
"""Entries of the table of moved tests that none of the collected tests fits, where all were collected."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from tests.second_lane import unknown

    everything = not any("::" in argument for argument in config.args)
    config.stash[UNKNOWN] = unknown(item.nodeid for item in items) if everything else []
    left_out = [item for item in items if not _wanted(item, config)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


def _wanted(item: pytest.Item, config: pytest.Config) -> bool:
    # Imported before the options are known it would take ``--all`` for the first lane.
    from tests.second_lane import is_moved

    soak = config.getoption("--soak")
    if soak and item.nodeid in config.pluginmanager.get_plugin("soak-report").passed:
        return False
    if item.get_closest_marker("soak") and not soak:
        return False
    if (item.get_closest_marker("daily") or is_moved(item.nodeid)) and not (
        config.getoption("--all") or soak
    ):
        return False
    needed = item.get_closest_marker("backend")
    return needed is None or needed.args[0] == config.getoption("--backend")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tolerances.FOLDER in os.environ:
        lines = tolerances.summary()
        terminalreporter.section(f"{len(lines)} comparisons use more than half of their tolerance")
        for line in lines:
            terminalreporter.write_line(line)

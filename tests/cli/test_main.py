"""The entry point: subcommands, help, exit codes, errors without tracebacks."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mt_megatron import __version__
from mt_megatron.cli import main as cli
from mt_megatron.cli.commands import GROUPS
from mt_megatron.errors import BackendError, ConfigError
from tests.launch import run_command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``mt-megatron`` with ``arguments`` in a process of its own."""
    return run_command([sys.executable, "-m", "mt_megatron.cli", *arguments], timeout=300)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_subcommand_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mt-megatron {name}")
    assert (
        f"mt-megatron {name}" in text.split("example")[1]
        or f"mt_megatron.cli {name}" in text.split("example")[1]
    )
    assert text.rstrip().splitlines()[-1].startswith("next: "), "what to do afterwards"


def test_help_lists_the_subcommands_and_exit_codes_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom mt_megatron.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules\n"
        # No subcommand is imported: the listing is a table.
        "absent = {'mt_megatron.cli.scan', 'mt_megatron.training', 'yaml', 'pydantic'}\n"
        "assert not absent & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n    {name}" in done.stdout
    for group in GROUPS:
        assert f"\n{group}:\n" in done.stdout
    assert "exit codes: 0 fine, 1 a problem was found, 2 wrong use" in done.stdout


def test_version() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"mt-megatron {__version__}")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonesuch",),
        ("--nonesuch",),
        ("plan", "--nonesuch"),
        ("plan", "--model", "nonesuch"),
        ("plan",),
        ("doctor", "--nonesuch"),
        ("doctor", "extra"),
        ("doctor", "--js"),
        ("pretrain", "--nonesuch", "1"),
        ("pretrain",),
        ("patches",),
        ("patches", "nonesuch"),
    ],
)
def test_wrong_use_ends_with_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert done.returncode == 2, done
    assert done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def with_command(monkeypatch: pytest.MonkeyPatch, behaviour: Any) -> None:
    """Make ``mt-megatron tried`` do ``behaviour(args)``."""
    module = ModuleType("mt_megatron.cli.tried")

    def add_parser(subparsers: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = subparsers.add_parser("tried")
        parser.set_defaults(func=behaviour, config_arguments=True)
        return parser

    module.add_parser = add_parser  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mt_megatron.cli.tried", module)
    monkeypatch.setattr(cli, "COMMANDS", ("tried",))


@pytest.mark.parametrize(
    ("error", "code"),
    [(BackendError("no device"), 1), (ConfigError("bad value"), 2), (KeyboardInterrupt(), 130)],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    with_command(monkeypatch, fail)
    assert cli.main(["tried"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    said = (
        f"mt-megatron: {type(error).__name__}: {error}" if code != 130 else "mt-megatron tried: interrupted"
    )
    assert captured.err == f"{said}\n"


def test_unexpected_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise RuntimeError("a defect")

    with_command(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(["tried"])


def test_configuration_arguments_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def keep(args: argparse.Namespace) -> int:
        seen.extend(args.config_argv)
        return 0

    with_command(monkeypatch, keep)
    given = ["--data-path", "0.3", "a", "0.7", "b", "--min-lr", "-1", "--bf16", "--lr=3e-4", "--config", "f"]
    assert cli.main(["tried", *given]) == 0
    assert seen == given


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m mt_megatron.cli pretrain --list-options | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1


def user_seconds(*arguments: str) -> float:
    """User CPU time of ``mt-megatron`` with ``arguments``, the least of three."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        command(*arguments)
        spent.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return min(spent)


def test_help_is_there_at_once() -> None:
    """0.05 s where this was written; with all subcommands imported it was 0.2 s."""
    assert user_seconds("--help") < 0.15


def test_every_module_of_a_subcommand_is_listed() -> None:
    folder = Path(cli.__file__).parent
    files = [*folder.glob("*.py"), *folder.glob("*/command.py")]
    declaring = {
        path.stem if path.parent == folder else path.parent.name
        for path in files
        if "def add_parser(" in path.read_text()
    }
    assert declaring == set(cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("prepair", "there is no command 'prepair'. Did you mean prepare?"),
        ("scan reprot RUN", "found 'reprot'; expected one of report,"),
        ("scan reprot RUN", "Did you mean report?"),
        ("patches lst", "Did you mean list?"),
        ("launch --print slrum -- --x", "Did you mean slurm?"),
        ("prepare --ouput x", "there is no option --ouput. Did you mean --output?"),
        ("prepare --ouput=x", "there is no option --ouput. Did you mean --output?"),
        ("convert --form-hf x --to-hf y", "there is no option --form-hf. Did you mean --from-hf"),
        ("prepare", "the following arguments are required: --output"),
        ("doctor --nonesuch", "there is no option --nonesuch. See mt-megatron doctor --help."),
        ("launch --nods 2 -- --lr 1", "there is no option --nods. Did you mean --nodes?"),
        (
            "launch --config run.yaml",
            "Options of mt-megatron pretrain stand after --: mt-megatron launch [options] -- --config",
        ),
    ],
)
def test_a_slip_gets_a_suggestion(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("convert --from-hf . --to-hf x --dtyp bf16", "--dtype"),
        ("plan --model llama3_tiny --sugest", "--suggest"),
        ("pretrain --list-model", "--list-models"),
        ("pretrain --num-layer 2", "--num-layers"),
    ],
)
def test_a_slip_is_near_an_option_of_the_command_or_of_a_run(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *(
            "doctor",
            "patches list",
            "patches check",
            "patches explain auto",
            "fp8 recipes",
            "fp8 report auto",
        ),
        *("plan", "plan --backend auto", "launch", "launch --nodes 1", "pretrain --backend auto"),
        *("pipeline explain auto", "pipeline simulate auto", "pipeline draw auto", "pipeline compare"),
        *("pipeline simulate --pipeline-schedule auto", "diverge --a cpu --b cpu", "scan report auto"),
        *("scan simulate auto", "scope report auto", "run --backend auto", "prepare --output auto"),
        *("convert --from-hf auto --to-torch auto", "preprocess --input auto --output-prefix auto"),
    ],
)
def test_a_word_that_belongs_to_no_option_is_named(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = cli.main([*words.split(), "extra_positional"])
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    assert (code, output.out) == (2, "") and "extra_positional" in output.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())

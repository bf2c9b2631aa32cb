"""Which folders are read and written: found, refused early, or known to be done."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mt_megatron.checkpoint.files import LATEST, read_manifest, write_manifest
from mt_megatron.errors import CheckpointError, ConfigError
from tests.convert import published
from tests.convert.recorded_run import Quiet, converted
from tests.launch import ROOT


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "mixtral"
    shape = published.draw("mixtral", random.Random(0)) | {"tie_word_embeddings": False}
    published.write(folder, "mixtral", shape, seed=0)
    return folder


def test_weights_of_a_perturbed_run_stay_marked(mixtral: Path, tmp_path: Path) -> None:
    folder = converted(mixtral, tmp_path / "run", "torch_dist").folder
    for mark in (None, "noise"):
        document = read_manifest(folder)
        write_manifest(folder, document if mark is None else {**document, "perturbed": mark})
        progress = Quiet()
        made = converted(folder, tmp_path / f"as {mark}", "torch_dist", progress=progress)
        assert read_manifest(made.folder).get("perturbed") == mark
        assert any("is of a perturbed run (noise)" in line for line in progress.lines) == (mark is not None)


def test_the_same_command_again_finds_its_result(mixtral: Path, tmp_path: Path) -> None:
    """Another command, or a result that was changed since, is another matter."""
    for form in ("huggingface", "torch_dist", "torch"):
        out = tmp_path / form
        made = converted(mixtral, out, form)
        times = {each: each.stat().st_mtime_ns for each in made.folder.iterdir()}
        if form != "huggingface":
            (out / LATEST).unlink()  # as a kill right before it leaves it
        progress = Quiet()
        again = converted(mixtral, out, form, progress=progress, workers=1)
        assert again.folder == made.folder and again.bytes == made.bytes
        assert any("already holds the result" in line for line in progress.lines)
        assert {each: each.stat().st_mtime_ns for each in made.folder.iterdir()} == times
        assert form == "huggingface" or (out / LATEST).is_file()
        with pytest.raises(ConfigError, match="holds another conversion"):
            converted(mixtral, out, form, dtype="fp16")
        largest = max(made.folder.rglob("*"), key=lambda each: each.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-1])
        with pytest.raises(ConfigError, match="files changed since"):
            converted(mixtral, out, form)


def test_changed_side_files_are_another_conversion(mixtral: Path, tmp_path: Path) -> None:
    """By their contents: the same folder at another time is the same."""
    beside = tmp_path / "beside"
    beside.mkdir()
    settings = beside / "generation_config.json"
    settings.write_text('{"temperature": 0.5}')
    converted(mixtral, tmp_path / "out", "huggingface", side_files=beside)
    settings.write_text('{"temperature": 0.5}')
    converted(mixtral, tmp_path / "out", "huggingface", side_files=beside)
    settings.write_text('{"temperature": 0.7}')
    with pytest.raises(ConfigError, match="holds another conversion"):
        converted(mixtral, tmp_path / "out", "huggingface", side_files=beside)


def test_a_changed_tokenizer_of_the_run_is_another_conversion(mixtral: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    run = converted(mixtral, tmp_path / "run", "torch_dist").folder
    shutil.rmtree(run / "huggingface")
    document = read_manifest(run)
    document["config"]["data"]["tokenizer_model"] = str(tokenizer)
    for name in [each for each in document["files"] if each.startswith("huggingface/")]:
        del document["files"][name]
    write_manifest(run, document)
    for form in ("huggingface", "torch_dist", "torch"):
        tokenizer.write_text("{}")
        converted(run, tmp_path / form, form)
        tokenizer.write_text('{"a": 1}')
        if form == "torch":
            converted(run, tmp_path / form, form)  # Rank files have no place for a tokenizer.
            continue
        with pytest.raises(ConfigError, match="holds another conversion"):
            converted(run, tmp_path / form, form)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_run_that_went_on_in_the_result_keeps_its_newest(mixtral: Path, tmp_path: Path, form: str) -> None:
    made = converted(mixtral, tmp_path / "out", form)
    later = made.folder.with_name("iter_0000500")
    made.folder.rename(later)
    made.folder.symlink_to(later)  # Both are there.
    (tmp_path / "out" / LATEST).write_text("500\n")
    assert converted(mixtral, tmp_path / "out", form).folder == made.folder
    assert (tmp_path / "out" / LATEST).read_text() == "500\n"


@pytest.mark.parametrize("form", ["huggingface", "torch_dist", "torch"])
def test_a_destination_in_the_source_is_taken_up_and_known(mixtral: Path, tmp_path: Path, form: str) -> None:
    shutil.copytree(mixtral, tmp_path / "in")
    out = tmp_path / "in" / "out"
    made = converted(tmp_path / "in", out, form)
    progress = Quiet()
    assert converted(tmp_path / "in", out, form, progress=progress).folder == made.folder
    assert any("already holds the result" in line for line in progress.lines)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")  # Another source.
    with pytest.raises(ConfigError, match="holds another conversion"):
        converted(tmp_path / "in", out, form)


def test_a_run_is_taken_for_the_checkpoints_in_it(mixtral: Path, tmp_path: Path) -> None:
    converted(mixtral, tmp_path / "run" / "checkpoints", "torch_dist")
    assert converted(tmp_path / "run", tmp_path / "back", "huggingface").tensors
    (tmp_path / "run" / "checkpoints" / LATEST).unlink()
    with pytest.raises(CheckpointError, match="run is no Megatron checkpoint.*the folder that --save"):
        converted(tmp_path / "run", tmp_path / "other", "huggingface")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--from-hf absent --to-hf out", "absent is no folder here"),
        ("--from-hf someone/model-7B --to-hf out", "hf download someone/model-7B --local-dir"),
        ("--from-hf empty --to-hf out", "empty has no config.json"),
        ("--from-megatron absent --to-hf out", "absent is no folder"),
        ("--from-megatron empty --to-hf out", "empty is no Megatron checkpoint"),
        ("--from-hf good --to-hf full", "full is not empty (it holds mine)"),
        ("--from-hf good --to-megatron good", "good is the source as well"),
    ],
)
def test_wrong_places_are_refused_before_torch_is_imported(words: str, says: str, tmp_path: Path) -> None:
    for name in ("empty", "full", "good"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "good" / "config.json").write_text("{}")
    code = (
        "import sys\nfrom mt_megatron.cli.main import main\n"
        f"code = main(['convert', *{words.split()!r}])\n"
        "print(code, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "2 False\n" and says in done.stderr

"""A damaged source is refused by the name of its file, whatever it is converted into."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_megatron.checkpoint import retention
from mt_megatron.checkpoint.files import MANIFEST, MARKER, folder_name
from mt_megatron.errors import CheckpointError
from tests.convert import published
from tests.convert.published import differing, read
from tests.convert.recorded_run import Quiet, converted

FORMS = ("huggingface", "torch_dist", "torch")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in the three forms."""
    folder = tmp_path_factory.mktemp("sources")
    published.write(folder / "huggingface", "llama", published.draw("llama", random.Random(0)), seed=0)
    for form in FORMS[1:]:
        converted(folder / "huggingface", folder / form, form)
    return folder


def flip_the_middle_of_the_largest(folder: Path) -> Path:
    largest = max(
        (each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x01
    largest.write_bytes(content)
    return largest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", FORMS[1:])
def test_one_flipped_byte_is_refused_by_every_form(
    sources: Path, tmp_path: Path, source: str, form: str
) -> None:
    shutil.copytree(sources / source, tmp_path / "in")
    damaged = flip_the_middle_of_the_largest(tmp_path / "in")
    with pytest.raises(CheckpointError) as refused:
        converted(tmp_path / "in", tmp_path / "out", form)
    assert f"{damaged} is damaged" in str(refused.value)
    assert "--no-verify-checkpoint" in str(refused.value)
    assert not (tmp_path / "out").exists()
    # Without the checksum nobody would notice: the damage is in the weights and converts.
    converted(tmp_path / "in", tmp_path / "out", form, verify=False)
    if form == "huggingface":
        assert len(differing(read(tmp_path / "out"), read(sources / "huggingface"))) == 1


def _without_manifest(folder: Path) -> None:
    for name in (MANIFEST, MARKER):
        (folder / folder_name(1) / name).unlink()


def _without_checksums(folder: Path) -> None:
    manifest = folder / folder_name(1) / MANIFEST
    document = json.loads(manifest.read_text())
    del document["files"]
    manifest.write_text(json.dumps(document))
    (folder / folder_name(1) / MARKER).unlink()


@pytest.mark.parametrize("change", [_without_manifest, _without_checksums])
def test_a_checkpoint_without_checksums_is_said(
    sources: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    shutil.copytree(sources / "torch_dist", tmp_path / "in")
    change(tmp_path / "in")
    progress = Quiet()
    converted(tmp_path / "in", tmp_path / "out", "huggingface", progress=progress)
    assert [line for line in progress.lines if "has no checksums" in line] == [
        f"{tmp_path / 'in' / folder_name(1)} has no checksums: its files are taken as they are"
    ]


@pytest.mark.parametrize("source", FORMS[1:])
def test_a_sound_one_says_nothing_of_checksums(sources: Path, tmp_path: Path, source: str) -> None:
    progress = Quiet()
    converted(sources / source, tmp_path / "out", "huggingface", progress=progress)
    assert not any("checksum" in line or "damaged" in line for line in progress.lines)


def test_rank_files_as_torch_saves_them_are_sound(sources: Path, tmp_path: Path) -> None:
    """Their checksums are torch's own here, not ours."""
    shutil.copytree(sources / "torch", tmp_path / "in")
    for path in (tmp_path / "in").rglob("*.pt"):
        torch.save(torch.load(path, weights_only=False), path)
    converted(tmp_path / "in", tmp_path / "out", "huggingface")
    assert differing(read(tmp_path / "out"), read(sources / "huggingface")) == []
    flip_the_middle_of_the_largest(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt is damaged"):
        converted(tmp_path / "in", tmp_path / "again", "huggingface")


def test_rank_files_that_torch_saved_without_checksums_are_read(sources: Path, tmp_path: Path) -> None:
    # Not by monkeypatch: its undoing deletes the entry of torch's configuration.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    shutil.copytree(sources / "torch", tmp_path / "in")
    for path in (tmp_path / "in").rglob("*.pt"):
        torch.save(torch.load(path, weights_only=False), path)
    torch.serialization.set_crc32_options(before)
    progress = Quiet()
    converted(tmp_path / "in", tmp_path / "out", "huggingface", progress=progress)
    assert any("has no checksums" in line for line in progress.lines)
    assert differing(read(tmp_path / "out"), read(sources / "huggingface")) == []


def test_the_source_is_not_pruned_meanwhile(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mt_megatron.convert import run

    shutil.copytree(sources / "torch_dist", tmp_path / "in")
    shutil.copytree(tmp_path / "in" / folder_name(1), tmp_path / "in" / folder_name(2))
    pruned: list[list[Path]] = []

    def prune() -> list[Path]:
        return retention.prune(tmp_path / "in", keep_last=1, retain_interval=None)

    original: Any = run._source

    def while_it_reads(*args: Any) -> Any:
        (tmp_path / "in" / "latest_checkpointed_iteration.txt").write_text("2\n")
        pruned.append(prune())
        return original(*args)

    monkeypatch.setattr(run, "_source", while_it_reads)
    converted(tmp_path / "in", tmp_path / "out", "huggingface")
    assert pruned == [[]]
    assert prune() == [tmp_path / "in" / folder_name(1)]

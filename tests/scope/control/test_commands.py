"""Commands: what is one, the queue, and the folder through which they come without a sidecar."""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.cli.scope.control import _commands, add_parser
from mt_megatron.errors import ConfigError
from mt_megatron.scope.control.commands import (
    MOST_BYTES,
    MOST_WAITING,
    Command,
    Queue,
    Spool,
    answered,
    command_from,
    is_listening,
    leave,
    take_back,
)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool(tmp_path)
    made.open()
    return made


def test_a_command_left_is_heard_once_and_answered(spool: Spool, tmp_path: Path) -> None:
    assert is_listening(tmp_path) and not is_listening(tmp_path / "elsewhere")
    first, second = leave(tmp_path, "pause", {}), leave(tmp_path, "step", {"n": 3})
    heard = [command_from(each) for each in spool.look()]
    assert [(each.id, each.do, each.arguments) for each in heard] == [
        (first, "pause", {}),
        (second, "step", {"n": 3}),
    ]
    assert spool.look() == [] and not take_back(tmp_path, first)
    assert answered(tmp_path, first) is None
    spool.answer(first, {"id": first, "ok": True, "value": {"paused": True}})
    assert answered(tmp_path, first) == {"id": first, "ok": True, "value": {"paused": True}}
    third = leave(tmp_path, "resume", {})
    assert take_back(tmp_path, third) and spool.look() == []


def test_only_the_owner_may_command(spool: Spool, tmp_path: Path) -> None:
    leave(tmp_path, "pause", {})
    folder = tmp_path / "commands"
    assert folder.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    spool.look()
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"id": "x", "do": "pause"}))
    (folder / "link.json").symlink_to(secret)
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    (folder / "large.json").write_bytes(b" " * (MOST_BYTES + 1))
    (folder / "broken.json").write_text("{")
    assert spool.look() == ["{"], "what is no command is answered as wrong, and nothing else is read"
    assert secret.exists()


def test_what_an_earlier_run_left_is_not_obeyed(spool: Spool, tmp_path: Path) -> None:
    leave(tmp_path, "pause", {})
    Spool(tmp_path).open()
    assert spool.look() == []


@pytest.mark.parametrize("link", ["commands", "results"])
def test_a_link_in_place_of_its_folder_leaves_the_target_alone(tmp_path: Path, link: str) -> None:
    target, folder = tmp_path / "target", tmp_path / "scope"
    for each in (target, folder):
        each.mkdir(mode=0o755)
    (target / "mine.json").write_text("{}")
    (folder / link).symlink_to(target)
    spool = Spool(folder)
    with pytest.raises(OSError, match="Not a directory|symbolic"):
        spool.open()
    assert spool.look() == []
    assert (target / "mine.json").exists() and target.stat().st_mode & 0o777 == 0o755


def test_a_command_that_comes_while_the_folder_is_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def left_meanwhile(path: Path, **options: Any) -> None:
        mkdir(path, **options)
        if path.name == "commands":
            leave(tmp_path, "pause", {})

    monkeypatch.setattr(Path, "mkdir", left_meanwhile)
    spool = Spool(tmp_path)
    spool.open()
    assert [each["do"] for each in spool.look()] == ["pause"]


def test_answers_do_not_pile_up(spool: Spool, tmp_path: Path) -> None:
    for number in range(120):
        spool.answer(f"a{number}", {"ok": True})
    spool.answer("../../outside", {"ok": True})
    assert len(list((tmp_path / "results").iterdir())) == 100
    assert not (tmp_path.parent / "outside.json").exists()


def test_large_answers_do_not_pile_up(spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_megatron.scope.control.commands._KEPT_BYTES", 10_000)
    for number in range(8):
        spool.answer(f"a{number}", {"ok": True, "value": "x" * 3000})
        os.utime(tmp_path / "results" / f"a{number}.json", (number, number))
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"a5.json", "a6.json", "a7.json"}
    spool.answer("whole", {"ok": True, "value": "x" * 30_000})
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["whole.json"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("pause", "expected a command"),
        ({"do": "pause"}, "found id ''"),
        ({"id": "a/b", "do": "pause"}, "found id 'a/b'"),
        ({"id": "a", "do": "stop"}, "expected one of pause, step.*Did you mean step"),
        ({"id": "a", "do": None}, "found the command None"),
        ({"id": "a", "do": "pause", "arguments": [1]}, "expected names and values"),
        ({"id": "a", "do": "step", "arguments": {"n": 0}}, "found n: 0"),
        ({"id": "a", "do": "step", "arguments": {"n": "2"}}, "found n: '2'"),
    ],
)
def test_what_is_no_command_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        command_from(given)


def test_a_file_s_perturbations_are_a_command_each(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    mask = "{kind: mask, on: weight, module: '*', name: "
    file.write_text(f"snapshot_limit_mib: 7\nperturbations: [{mask}a}}, {mask}b}}]")
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    for options, names in (([], ["a", "b"]), (["--name", "b"], ["b"])):
        args = parser.parse_args(["control", "RUN", "arm", str(file), *options])
        commands = _commands(args)
        assert [each["perturbation"]["name"] for each in commands] == names
        assert {each["snapshot_limit_mib"] for each in commands} == {7}
    with pytest.raises(ConfigError, match="no perturbation named 'c'"):
        _commands(parser.parse_args(["control", "RUN", "arm", str(file), "--name", "c"]))
    with pytest.raises(ConfigError, match="found --name for undo"):
        _commands(parser.parse_args(["control", "RUN", "undo", "--name", "b"]))


def test_a_queue_wakes_who_waits_and_has_an_end() -> None:
    queue = Queue()
    assert not queue and queue.take() == [] and queue.take(0.01) == []
    threading.Timer(0.05, lambda: queue.put(Command(id="a", do="pause"))).start()
    assert [each.id for each in queue.take(30)] == ["a"]
    for number in range(MOST_WAITING):
        queue.put(Command(id=str(number), do="pause"))
    assert queue
    with pytest.raises(ConfigError, match="commands waiting"):
        queue.put(Command(id="more", do="pause"))
    assert len(queue.take()) == MOST_WAITING

"""The file that a device run leaves: readable text, and the same as JSON at its end."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.device.result import Result

ROOT = Path(__file__).resolve().parent.parent.parent


def new_path(folder: Path, backend: str, now: datetime.datetime) -> Path:
    """``device-BACKEND-DATE.md`` below ``folder``, which is made; with a number where it exists already."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"device-{backend}-{now:%Y-%m-%d}"
    path = folder / f"{stem}.md"
    number = 2
    while True:
        try:
            # Made at once: another run of the day takes another name.
            path.touch(exist_ok=False)
            return path
        except FileExistsError:
            path = folder / f"{stem}-{number}.md"
            number += 1


def write(path: Path, text: str) -> None:
    """Replace the report at ``path``; a run that is killed meanwhile leaves the old one."""
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_text(text, encoding="utf-8")
    whole.replace(path)


def as_text(backend: str, facts: dict[str, Any], results: Sequence[Result], now: datetime.datetime) -> str:
    """The report's text."""
    counts = Counter(result.outcome for result in results)
    lines = [
        f"# Device run on {backend}, {now.isoformat(timespec='seconds')}",
        "",
        ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")) + ".",
        "",
        *(f"- {name}: {_plain(value)}" for name, value in facts.items()),
    ]
    for section in dict.fromkeys(result.section for result in results):
        lines += [
            "",
            f"## {section}",
            "",
            "| check | outcome | seconds | figures or reason |",
            "|---|---|---|---|",
        ]
        for result in results:
            if result.section == section:
                note = "; ".join(f"{name} = {_plain(value)}" for name, value in result.figures.items())
                if result.reason:
                    # The whole traceback is in the JSON.
                    note = result.reason.strip().splitlines()[-1][:300]
                lines.append(
                    f"| {result.name} | {result.outcome} | {result.seconds} | {note.replace('|', '/')} |"
                )
    record = {
        "date": now.isoformat(timespec="seconds"),
        "backend": backend,
        "facts": facts,
        "results": [asdict(result) for result in results],
    }
    lines += ["", "## The same as JSON", "", "```json", json.dumps(record, indent=1, default=str), "```", ""]
    return _without_folders("\n".join(lines))


def _without_folders(text: str) -> str:
    """``text`` with files named as they are found, without where this machine keeps them."""
    folders = {str(ROOT), sys.prefix, sys.base_prefix, str(Path.home()), *map(os.path.abspath, sys.path)}
    for folder in sorted(folders - {os.sep}, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return text


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return str(value)

"""The record of a run of upstream's unit tests as a table."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.upstream.unit.reasons import KINDS, Reason, Verdict

COLUMNS = ("passed", "failed", "skipped", "cannot be imported")


def record(
    results: Mapping[str, Any],
    verdict: Verdict,
    *,
    about: Mapping[str, Any],
    checkout: Path,
) -> dict[str, Any]:
    """Everything about one combination of backend and ranks, as JSON. ``results``: file -> its result."""
    files = {file: dict.fromkeys(COLUMNS, 0) | {"seconds": each["seconds"]} for file, each in results.items()}
    tests = []
    for file, each in results.items():
        for test in each["tests"]:
            files[file][test["outcome"]] += 1
            if test["outcome"] == "passed":
                continue
            reason = verdict.explained.get(test["test"])
            tests.append(
                {
                    **{key: test[key] for key in ("test", "outcome", "ranks")},
                    "says": _said(test["text"], checkout),
                    **({"kind": reason.kind, "evidence": reason.evidence} if reason else {}),
                }
            )
    total = {column: sum(each[column] for each in files.values()) for column in COLUMNS}
    return {
        **about,
        "total": total,
        "files": files,
        "not_passed": tests,
        "problems": list(verdict.problems),
        "unreviewed": list(verdict.unreviewed),
    }


def _said(text: str, checkout: Path) -> str:
    """The first line, without places of the machine that the tests ran on."""
    line = text.strip().partition("\n")[0].replace(str(checkout), "CHECKOUT")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*", "TMP", line)[:300]


def as_markdown(data: Mapping[str, Any], explained: Mapping[str, Reason]) -> str:
    """The table of one combination, below a heading of the second level."""
    total = data["total"]
    lines = [
        f"## {data['backend']}{' (the emulator of tests/emulators)' if data['emulated'] else ''}, "
        f"{data['ranks']} rank{'s' if data['ranks'] > 1 else ''}",
        "",
        f"{sum(total.values())} tests: " + ", ".join(f"{total[column]} {column}" for column in COLUMNS) + ".",
        "",
        _row("file", *COLUMNS, "seconds"),
        "|---|" + "---:|" * (len(COLUMNS) + 1),
        *(
            _row(f"`{file}`", *(each[column] or "" for column in COLUMNS), round(each["seconds"]))
            for file, each in data["files"].items()
        ),
        _row(
            "all",
            *(total[column] for column in COLUMNS),
            round(sum(e["seconds"] for e in data["files"].values())),
        ),
        "",
    ]
    if explained:
        lines += [_row("why not passed", "tests", "evidence"), "|---|---:|---|", *_reasons(explained), ""]
    lines += [f"- **problem**: {problem}" for problem in data["problems"]]
    if data["unreviewed"]:
        lines += [
            f"Without a verdict, since this combination is not reviewed: {len(data['unreviewed'])} tests.",
            "",
        ]
        lines += [f"- `{test}`" for test in data["unreviewed"]]
    return "\n".join(lines).rstrip() + "\n"


def _reasons(explained: Mapping[str, Reason]) -> Sequence[str]:
    tests: dict[Reason, list[str]] = {}
    for test, reason in explained.items():
        tests.setdefault(reason, []).append(test)
    counts = Counter(reason.kind for reason in explained.values())
    rows = []
    for kind in KINDS:
        if counts[kind]:
            rows.append(_row(f"**{kind}**", f"**{counts[kind]}**", ""))
        for reason, names in tests.items():
            if reason.kind == kind:
                shown = ", ".join(f"`{name}`" for name in reason.tests)
                rows.append(_row(shown, len(names), reason.evidence))
    return rows


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

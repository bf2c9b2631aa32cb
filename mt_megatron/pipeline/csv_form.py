"""Schedules as CSV: one row per rank, one cell per action, as ``torch.distributed.pipelining`` writes them.

A cell is stage, action, micro-batch: ``3F1``, ``3B1`` (whole backward), ``3I1`` (gradients of the input
alone) with ``3W1`` (gradients of the weights), ``3SEND_F1``, ``3RECV_F1``, ``3SEND_B1``, ``3RECV_B1``, and
``3REDUCE_GRAD``. Empty cells are idle steps, which a schedule does not need. A step in which torch overlaps
a forward and a backward, ``(3F2;0B1)OVERLAP_F_B``, is read as one after the other.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from ..errors import ConfigError
from .actions import Action, Kind, Placement, Schedule, Style

# Python refuses to read a number of thousands of digits.
_CELL = re.compile(r"(\d{1,18})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,18})|(\d{1,18})REDUCE_GRAD")
_OVERLAPPED = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """``schedule`` as CSV; its name is not in it."""
    split = schedule.splits_backward
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for actions in schedule.ranks:
        writer.writerow([_cell(action, (action.stage, action.microbatch) in split) for action in actions])
    return out.getvalue()


def _cell(action: Action, split: bool) -> str:
    if action.kind is Kind.REDUCE:
        return f"{action.stage}REDUCE_GRAD"
    kind = "I" if action.kind is Kind.B and split else action.kind.value
    return f"{action.stage}{kind}{action.microbatch}"


def read_csv(path: str | Path) -> Schedule:
    """The schedule in a file, named like it. Raises ConfigError with line and column of what is wrong; the
    rules of schedules are checked by ``validate``, not here."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}; expected a pipeline schedule as CSV, one row of actions per rank"
        ) from None
    return from_csv(text, path.stem, where=str(path))


def from_csv(text: str, name: str, *, where: str = "schedule") -> Schedule:
    """The schedule that ``text`` holds. ``where`` begins error messages."""
    ranks: list[tuple[Action, ...]] = []
    cells: dict[Action, tuple[int, int, str]] = {}
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        for row in reader:
            if not row:
                raise ConfigError(
                    f"{where}, line {reader.line_num}: found an empty line; expected a rank's actions"
                )
            actions: list[Action] = []
            for column, cell in enumerate(row, start=1):
                for part in _parts(cell.strip(), f"{where}, line {reader.line_num}, column {column}"):
                    actions.append(part[0])
                    cells.setdefault(part[0], (reader.line_num, column, part[1]))
            ranks.append(tuple(actions))
    except csv.Error as error:
        raise ConfigError(f"{where}, line {reader.line_num}: {error}; expected cells with commas") from None
    if not cells:
        raise ConfigError(f"{where}: found no action; expected one row of actions per rank")
    _check_numbers(cells, where)
    _check_split(cells, where)
    return Schedule(
        name,
        _placement(ranks, cells, where),
        1 + max(action.microbatch for action in cells),
        tuple(ranks),
        forward_only=not any(action.kind is Kind.B for action in cells),
    )


def _parts(cell: str, where: str) -> list[tuple[Action, str]]:
    """The actions of one cell, each with the letters of its kind."""
    if not cell:
        return []
    overlapped = _OVERLAPPED.fullmatch(cell)
    return [_action(part, where) for part in (overlapped.groups() if overlapped else (cell,))]


def _action(cell: str, where: str) -> tuple[Action, str]:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ConfigError(
            f"{where}: found {cell!r}; expected a stage, F, B, I, W, SEND_F, RECV_F, SEND_B or RECV_B, and a "
            "micro-batch, such as 3F1, or 3REDUCE_GRAD"
        )
    stage, kind, microbatch, reduced = match.groups()
    if reduced is not None:
        return Action(Kind.REDUCE, int(reduced), -1), "REDUCE_GRAD"
    return Action(Kind.B if kind == "I" else Kind(kind), int(stage), int(microbatch)), kind


def _check_numbers(cells: dict[Action, tuple[int, int, str]], where: str) -> None:
    """Raise for a number that no schedule of so few actions has: tables of all stages and micro-batches are
    made of the largest ones."""
    for action, (line, column, kind) in cells.items():
        for what, number in (("stages", action.stage), ("micro-batches", action.microbatch)):
            if number >= len(cells):
                shown = "" if action.microbatch < 0 else str(action.microbatch)
                raise ConfigError(
                    f"{where}, line {line}, column {column}: found {action.stage}{kind}{shown} among "
                    f"{len(cells)} actions; expected an action of each stage and micro-batch, {what} that "
                    "count from 0"
                )


def _check_split(cells: dict[Action, tuple[int, int, str]], where: str) -> None:
    """Raise unless I and W come together, and B without W."""
    for action, (line, column, kind) in cells.items():
        if action.kind is not Kind.B:
            continue
        weights = cells.get(action._replace(kind=Kind.W))
        at = f"{where}, line {line}, column {column}: found {action.stage}{kind}{action.microbatch}"
        if kind == "I" and weights is None:
            raise ConfigError(
                f"{at} without {action.stage}W{action.microbatch}; expected its weight gradients too, or "
                f"{action.stage}B{action.microbatch} for the whole backward"
            )
        if kind == "B" and weights is not None:
            raise ConfigError(
                f"{at}, a whole backward, beside {action.stage}W{action.microbatch} in line {weights[0]}, "
                f"column {weights[1]}; expected {action.stage}I{action.microbatch} there"
            )


def _placement(
    ranks: list[tuple[Action, ...]], cells: dict[Action, tuple[int, int, str]], where: str
) -> Placement:
    """Megatron-Core's placement if the stages lie so, the V otherwise."""
    stages = 1 + max(action.stage for action in cells)
    if stages % len(ranks):
        raise ConfigError(
            f"{where}: found {stages} stages in {len(ranks)} rows; expected as many for each rank (row)"
        )
    chunks = stages // len(ranks)
    styles = [Style.LOOP, Style.V] if chunks == 2 else [Style.LOOP]
    wrong = {}
    for style in styles:
        placement = Placement(len(ranks), chunks, style)
        lies = ((r, a) for r, actions in enumerate(ranks) for a in actions if placement.rank(a.stage) != r)
        if (found := next(lies, None)) is None:
            return placement
        wrong[style] = found
    rank, action = wrong[Style.LOOP]
    line, column, _ = cells[action]
    raise ConfigError(
        f"{where}, line {line}, column {column}: found an action of stage {action.stage} in row {rank + 1}; "
        f"expected stage s in row 1 + s mod {len(ranks)}"
        + (", or in a V: back from the last row to the first" if chunks == 2 else "")
    )

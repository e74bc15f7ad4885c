"""Schedules as CSV files of `torch.distributed.pipelining`: a line for each rank, an action in each cell.

    0F0,0F1,,,0B0,,0B1
    ,1F0,1B0,1F1,1B1

Its schedules write such files (`_dump_csv`) and read them (`_load_csv`), as "compute_only" or, with messages, as
"compute_comms".  An empty cell is a bubble; `(0F1;1B0)OVERLAP_F_B` holds computes that may overlap.  When a file is
read, only its computes count: which messages, gathers and sums they need follows from the plan, as for every schedule.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from autopart.files.limits import MAX_RANKS, MAX_VALUES, SHOWN
from autopart.files.reading import brief, malformed, named, read_text, unreadable
from autopart.files.storage import write_whole
from autopart.ir.actions import ACTIONS, COMPUTE, SEND, Action, Slot, completes
from autopart.ir.decision import Problem
from autopart.ir.errors import WRITABLE, UsageError
from autopart.ir.program import Program

Row = tuple[Action, ...]
"""The computes of one rank of the pipeline, in order."""

_COMPUTES = ("F", "B", "I", "W")
_MESSAGES, _ONCE = ("SEND_F", "RECV_F", "SEND_B", "RECV_B"), ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_SLOT = re.compile(rf"([0-9]{{1,6}})({'|'.join((*_COMPUTES, *_MESSAGES))})([0-9]{{1,6}})")
_STAGE = re.compile(rf"[0-9]{{1,6}}({'|'.join(_ONCE)})")
_FIX = "write it with _dump_csv of torch.distributed.pipelining, or autopart.save_schedule"


class _Cell(NamedTuple):
    """A compute and where it stands."""

    action: Action
    line: int
    place: str


def read_schedule_csv(path: str | os.PathLike[str]) -> tuple[Row, ...]:
    """Read the computes of each rank; lines without any are left out.

    Every stage from 0 on stands in one line, and runs each micro-batch from 0 on once forward, then once backward: `B`,
    or `I` and later `W`.  Whether the lines together can end is not checked here.  Raises UsageError that
    names the line and column of what is wrong.  O(cells).
    """
    with named(path, UsageError, _FIX):
        lines, problems = _lines(read_text(path))
        cells = [cell for line in lines for cell in line]
        problems = problems or list(_out_of_order(cells)) or list(_missing(cells))
        if problems:
            raise malformed("is not a schedule", problems[:MAX_RANKS])
        return tuple(tuple(cell.action for cell in line) for line in lines if line)


def _lines(text: str) -> tuple[list[list[_Cell]], list[Problem]]:
    """Return the computes of each line, and the cells that are no actions."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[list[_Cell]] = []
    problems: list[Problem] = []
    left = MAX_VALUES
    try:
        for row in reader:
            number = len(lines) + 1
            left -= len(row) + 1
            if left < 0 or number > MAX_RANKS:
                why = f"at most {MAX_VALUES} cells in {MAX_RANKS} lines are read"
                raise unreadable("is too large", where=f"line {number}", why=why)
            lines.append([])
            for column, cell in enumerate(row, 1):
                actions, place = _actions(cell.strip()), f"line {number}, column {column}"
                if actions is None:
                    why = f"{brief(cell)} is not an action; they look like 2F0, 2B0, 2I0, 2W0, 2SEND_F0 or 2UNSHARD"
                    problems.append((place, why))
                lines[-1] += [_Cell(action, number, place) for action in actions or ()]
    except csv.Error as error:
        raise unreadable("is not CSV", where=f"line {reader.line_num}", why=str(error)) from error
    return lines, problems


def _actions(cell: str) -> list[Action] | None:
    """Return the computes of a cell, or None if it is not an action."""
    both = _OVERLAP.fullmatch(cell)
    if both is not None:
        parts = [_actions(part.strip()) for part in both[1].split(";")]
        return None if None in parts else [action for part in parts for action in part or ()]
    found = _SLOT.fullmatch(cell)
    if found is None:
        return [] if not cell or _STAGE.fullmatch(cell) else None
    return [Action(found[2], Slot(int(found[1]), int(found[3])))] if found[2] in _COMPUTES else []


def _out_of_order(cells: list[_Cell]) -> Iterator[Problem]:
    """Yield computes in a line where they do not belong, and those that come too early or again.  O(cells)."""
    home: dict[int, int] = {}
    done: dict[Slot, str] = {}
    for cell in cells:
        action, line = cell.action, home.setdefault(cell.action.stage, cell.line)
        if line != cell.line:
            yield cell.place, f"{action} is in line {cell.line}, other computes of its stage are in line {line}"
        before = done.get(action.slot, "")
        if action.kind not in _NEXT[before]:
            yield cell.place, f"{action} comes after {Action(before, action.slot) if before else 'nothing of its slot'}"
        done[action.slot] = action.kind


def _missing(cells: list[_Cell]) -> Iterator[Problem]:
    """Yield the computes that a file lacks, after `_out_of_order` has found nothing.  O(cells)."""
    last = {cell.action.slot: cell.action.kind for cell in cells}
    stages = 1 + max((slot.stage for slot in last), default=-1)
    micros = 1 + max((slot.micro for slot in last), default=-1)
    if not cells or stages * micros > len(cells):
        yield "the file", f"{len(cells)} computes are too few for {stages} stages and {micros} micro-batches"
        return
    for slot in (Slot(stage, micro) for stage in range(stages) for micro in range(micros)):
        if wanted := _NEXT[last.get(slot, "")]:
            yield "the file", f"the {' or '.join(ACTIONS[kind].label for kind in wanted)} of {slot} is missing"


_NEXT = {"": ("F",), "F": ("B", "I"), "I": ("W",), "B": (), "W": ()}
"""The computes that may follow one on the same slot."""


# ---- writing -------------------------------------------------------------------------------------------------------


def schedule_to_csv(program: Program, *, messages: bool = False) -> str:
    """Return the computes of a program, a line for each group of ranks that run the same stages.

    messages: also what torch calls "compute_comms": sends and receives, the gathers of sharded parameters at a stage's
    first compute and the sum of gradients after its last; both ends of a message stand where the program's one order
    has it, so that messages of two ranks never cross.  Raises UsageError for what these files cannot say.  O(actions).
    """
    _check_writable(program, messages=messages)
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(_rows(program, messages=messages))
    return out.getvalue()


def save_schedule_csv(text: str, path: str | os.PathLike[str]) -> None:
    """Write the text of `schedule_to_csv` to a file, atomically.  Raises UsageError if it cannot be written."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise UsageError(f"cannot write {os.fspath(path)}", why=error.strerror or str(error), fix=WRITABLE) from error


def _check_writable(program: Program, *, messages: bool) -> None:
    what = "the schedule cannot be written for torch.distributed.pipelining"
    if program.slices > 1:
        why = "its actions are whole micro-batches, and the plan cuts sequences into slices"
        raise UsageError(what, why=why, fix="plan with token_slices=None")
    if any(division.period > 1 for division in program.divisions):
        why = "all ranks of a stage run all micro-batches there, and the plan has replicas that take them in turn"
        raise UsageError(what, why=why, fix='plan with replica_policy="split"')
    far = [edge for edge in program.edges if edge.dst != edge.src + 1]
    if messages and far:
        pairs = ", ".join(f"{edge.src} to {edge.dst}" for edge in far[:SHOWN])
        why = f"it sends between neighbouring stages alone, and values go from stage {pairs}"
        raise UsageError(what, why=why, fix="write the computes without messages")


def _rows(program: Program, *, messages: bool) -> Iterable[list[str]]:
    """Return the cells of each line, by the first stage of its ranks."""
    rows: dict[tuple[int, ...], list[str]] = {}
    row_of = [rows.setdefault(tuple(sorted(ranks)), []) for ranks in program.stage_ranks]
    begun: set[int] = set()
    left = [program.micros] * len(row_of)
    for action in program.order:
        role, stage, peer = action.is_a.role, action.stage, action.peer
        if role == COMPUTE:
            if messages and stage not in begun:
                begun.add(stage)
                row_of[stage].append(f"{stage}UNSHARD")
            row_of[stage].append(str(action))
            left[stage] -= completes(action.kind) == "B"
            if messages and completes(action.kind) == "B" and not left[stage]:
                row_of[stage] += [f"{stage}REDUCE_GRAD", f"{stage}RESHARD"]
        elif messages and role == SEND and peer is not None and row_of[peer] is not row_of[stage]:
            way = action.kind[-1]
            row_of[stage].append(f"{stage}SEND_{way}{action.micro}")
            row_of[peer].append(f"{peer}RECV_{way}{action.micro}")
    return rows.values()

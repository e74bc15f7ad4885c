"""Plan files: JSON that people may read, diff, edit and reuse.

    {"version": 3, "provenance": {...}, "decision": {...}, "report": {...}}

A plan file has no checksum: it may be edited by hand, and an edit is judged by what it says.  Every problem of a file
is reported at once, each with its JSON path.  `match_plan` then refuses a plan that was made for something else; that
needs the graph, so it is a step of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autopart.files.json_text import parse_json
from autopart.files.limits import MAX_BYTES, MAX_RANKS, MAX_ROWS, MOST_PROBLEMS, SHOWN
from autopart.files.reading import Source, brief, listed, read_text, source_of
from autopart.files.storage import write_whole
from autopart.files.validation import problems_of
from autopart.ir import plan as plan_ir
from autopart.ir.cluster import torchrun_line
from autopart.ir.errors import PlanError, PlanFileError
from autopart.ir.graph import Graph
from autopart.ir.plan import (
    AGAIN,
    Alternative,
    Decision,
    Estimate,
    Optimality,
    Plan,
    Problem,
    Provenance,
    Report,
    Stage,
)
from autopart.ir.printable import printable

MOST_GUESSES = 300
"""Changes of flags that are tried where a plan is for another model: each takes a digest of the graph."""
VERSION = 3
"""Of the format.  Version 2 was the same without sections; version 1 had no groups of recomputed ops."""


@dataclass(frozen=True, slots=True)
class _Document:
    """A plan file: the sections of a plan under the version of the format."""

    version: int
    provenance: Provenance
    decision: Decision
    report: Report = field(default=Report())


# Validation runs over the very classes of the IR; this is pydantic's hook for options of a foreign dataclass.
_CHECKED: tuple[Any, ...] = (_Document, Provenance, Decision, Report, Stage, Estimate, Optimality, Alternative)
for _class in _CHECKED:
    _class.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
_DOCUMENT = TypeAdapter(_Document)
_NUMBERS = re.compile(r'([\[{])\n *((?:"\w+": )?-?\d+(?:,\n *(?:"\w+": )?-?\d+)*)\n *([\]}])')
"""A list or table of whole numbers alone, spread over lines; a line break never stands inside of a text."""


def plan_to_json(plan: Plan) -> str:
    """Write the plan as indented JSON: equal plans give equal text, with an op a line and numbers side by side.

    Raises PlanError for a number that JSON cannot hold.
    """
    document = _Document(VERSION, plan.provenance, plan.decision, plan.report)
    try:
        text = json.dumps(asdict(document), indent=2, allow_nan=False)
    except ValueError as error:
        raise PlanError("the plan cannot be written as JSON", why=str(error)) from error
    return _NUMBERS.sub(lambda found: found[1] + re.sub(r"\n *", " ", found[2]) + found[3], text) + "\n"


def plan_from_json(text: str, source: str = "<plan>") -> Plan:
    """Read a plan; the inverse of `plan_to_json`.  source: what messages call the text.

    Raises PlanFileError naming the line (not JSON) or every JSON path (JSON that is not a valid plan).
    """
    parsed = parse_json(text, Source(source, PlanFileError, AGAIN))
    _check_version(parsed, source)
    try:
        document = _DOCUMENT.validate_json(text, strict=True)
    except ValidationError as error:
        raise _refused(source, problems_of(error)) from error
    plan = Plan(document.provenance, document.decision, document.report)
    found = chain(_out_of_range(document.decision), plan_ir.problems(plan))
    if problems := list(islice(found, MOST_PROBLEMS)):
        raise _refused(source, problems)
    return plan


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan so that the file is the old one or the new one at any moment.

    Raises PlanError when the plan is not valid, PlanFileError when the file cannot be written.
    """
    text = plan_to_json(plan_ir.check(plan))
    target = Path(path)
    if len(text) > MAX_BYTES:
        raise PlanFileError(f"cannot write the plan to {target}", why=f"at most {MAX_BYTES >> 10} KiB are read again")
    try:
        write_whole(target, text)
    except OSError as error:
        raise PlanFileError(f"cannot write the plan to {target}", why=str(error)) from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.  Raises PlanFileError."""
    return plan_from_json(read_text(path, source_of(path, PlanFileError)), os.fspath(path))


def match_plan(plan: Plan, graph: Graph, *, torch_version: str, world: int, local: int | None = None) -> None:
    """Refuse a plan that was made for something else than what is about to run.

    graph: captured at max(plan.micro_rows) rows.  torch_version: of the running process; major and minor must agree,
    for a capture by another release names ops differently.  world: ranks that run; local: on each host, None for all.
    Raises PlanError with every difference, or what `ir.plan.check` finds.
    """
    problems = list(_mismatches(plan, graph, torch_version, world))
    if problems:
        only_world = plan.world != world and len(problems) == 1
        fix = torchrun_line(plan.world, local) if only_world and not plan.world % (local or 1) else AGAIN
        raise PlanError("the plan was made for something else", why=listed(map(printable, problems)), fix=fix)
    plan_ir.check(plan, graph)


def _mismatches(plan: Plan, graph: Graph, torch_version: str, world: int) -> Iterator[str]:
    made_for, rows = plan.provenance, max(plan.micro_rows)
    if made_for.structure_digest != graph.structure_digest():
        yield f"another model: {_other_structure(made_for.structure_digest, graph)}"
    elif rows != graph.rows:
        yield f"another batch: its micro-batches have {rows} rows, not {graph.rows}"
    elif made_for.graph_digest != graph.shape_digest():
        yield f"other shapes or dtypes: its graph is {made_for.graph_digest}, not {graph.shape_digest()}"
    if made_for.torch_version.split(".")[:2] != torch_version.split(".")[:2]:
        yield f"another torch: it was made with {made_for.torch_version}, this is {torch_version}"
    if plan.world != world:
        yield f"another number of ranks: it is for {plan.world}, {world} run"


def _other_structure(wanted: str, graph: Graph) -> str:
    """Say how a graph differs from one with this digest, of which no more is known: by flags that one module or all
    frozen parameters have, or by anything else.  O(modules * graph)."""
    names = [p.name for p in graph.params if p.kind == "param"]
    frozen = tuple(p.name for p in graph.params if p.kind == "param" and not p.trainable)
    modules = dict.fromkeys(".".join(name.split(".")[:k]) for name in names for k in range(1, name.count(".") + 2))
    groups = [frozen, *(tuple(n for n in names if f"{n}.".startswith(f"{m}.")) for m in modules)]
    for group in islice(filter(None, dict.fromkeys(groups)), MOST_GUESSES):
        params = tuple(replace(p, trainable=(p.name in group) != p.trainable) for p in graph.params)
        if replace(graph, params=params).structure_digest() == wanted:
            now = "frozen" if group[0] in frozen else "trained"
            return f"requires_grad of {brief(', '.join(group))} has changed: now {now}"
    own = graph.structure_digest()
    return f"its structure (names, shapes, connections, requires_grad) is {wanted}, not {own}"


def diff_plans(a: Plan, b: Plan) -> str:
    """What changes from plan a to plan b, a line each: for what, what is decided, what it would take.

    Ops that move are counted by the stages they move between.
    """
    if a == b:
        return "the plans are equal"
    lines = [
        *_changes(a.provenance, b.provenance),
        *_changes(a.decision, b.decision, leave_out=("stages", "micro_rows")),
        *_decision_changes(a.decision, b.decision),
        *_changes(a.report, b.report, leave_out=tuple(_LONG)),
        *(f"{what} differ" for name, what in _LONG.items() if getattr(a.report, name) != getattr(b.report, name)),
    ]
    return "\n".join(map(printable, lines)) or "the same ops in another order"


_LONG = {"estimates": "estimates", "notes": "notes", "optimality": "lower bounds", "alternatives": "alternatives"}
"""Fields of a report of which only that they differ is said, and what they are called."""


def _changes(
    before: Provenance | Decision | Report, after: Provenance | Decision | Report, leave_out: tuple[str, ...] = ()
) -> Iterator[str]:
    """Fields of two sections of one class that differ, a line each."""
    for name in [each.name for each in fields(before)]:
        old, new = getattr(before, name), getattr(after, name)
        if name not in leave_out and old != new:
            yield f"{name}: {old} -> {new}"


def _decision_changes(a: Decision, b: Decision) -> Iterator[str]:
    if a.micro_rows != b.micro_rows:
        yield f"micro-batches: {_micro_batches(a)} -> {_micro_batches(b)}"
    if len(a.stages) != len(b.stages):
        yield f"stages: {len(a.stages)} -> {len(b.stages)}"
    for s, (old, new) in enumerate(zip(a.stages, b.stages, strict=False)):
        if old.ranks != new.ranks:
            yield f"stage {s} ranks: {list(old.ranks)} -> {list(new.ranks)}"
        if old.division != new.division and len(old.ranks) == len(new.ranks):
            yield f"stage {s} replicas: {_division(old)} -> {_division(new)}"
        if old.recompute != new.recompute:
            yield f"stage {s} recomputed ops: {_recomputed(old)} -> {_recomputed(new)}"
    yield from _moved_ops(a, b)


def _micro_batches(decision: Decision) -> str:
    """Such as "8 of 4 rows", or "2 of 4 and 1 of 3 rows"."""
    counts = Counter(decision.micro_rows)
    return " and ".join(f"{count} of {rows}" for rows, count in counts.items()) + f" row{'s' * (max(counts) > 1)}"


def _division(stage: Stage) -> str:
    return "in turn" if stage.division.in_turn else f"shares of {' : '.join(map(str, stage.division.shares))}"


def _recomputed(stage: Stage) -> int:
    return sum(map(len, stage.recompute))


def _moved_ops(a: Decision, b: Decision) -> list[str]:
    before, after = _homes(a), _homes(b)
    moves: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*before, *after]):
        move = before.get(name, "no stage"), after.get(name, "no stage")
        if move[0] != move[1]:
            moves.setdefault(move, []).append(name)
    return [f"{old} -> {new}: {_span(names)}" for (old, new), names in moves.items()]


def _homes(decision: Decision) -> dict[str, str]:
    homes: dict[str, list[int]] = {}
    for s, stage in enumerate(decision.stages):
        for name in stage.ops:
            homes.setdefault(name, []).append(s)
    return {name: f"stage {'+'.join(map(str, stages))}" for name, stages in homes.items()}


def _span(names: list[str]) -> str:
    return f"1 op, {names[0]}" if len(names) == 1 else f"{len(names)} ops, {names[0]} … {names[-1]}"


def _check_version(document: object, source: str) -> None:
    if not isinstance(document, dict):
        raise PlanFileError(f"{source} is not a plan", why="a plan is a JSON object", fix=AGAIN)
    if "version" not in document:
        raise PlanFileError(f"{source} is not a plan", where="version", why="the key is missing", fix=AGAIN)
    version = document["version"]
    if type(version) is not int or version != VERSION:
        raise PlanFileError(
            f"{source} has plan version {brief(version)}",
            where="version",
            why=f"this release reads version {VERSION}",
            fix=AGAIN,
        )


def _out_of_range(decision: Decision) -> Iterator[Problem]:
    """What no machine has: whoever plays or draws a plan makes tables of so many entries."""
    if decision.world > MAX_RANKS:
        yield "decision.world", f"at most {MAX_RANKS} ranks are supported, not {decision.world}"
    for i, rows in enumerate(decision.micro_rows):
        if rows > MAX_ROWS:
            yield f"decision.micro_rows[{i}]", f"a micro-batch has at most {MAX_ROWS} rows, not {rows}"


_MEND = f"mend what is named, or {AGAIN}"


def _refused(source: str, problems: list[Problem]) -> PlanFileError:
    if len(problems) == 1:
        return PlanFileError(f"{source} is not a valid plan", where=problems[0][0], why=problems[0][1], fix=_MEND)
    where = ", ".join(path for path, _ in problems[:SHOWN])
    why = listed(f"{path}: {message}" for path, message in problems)
    return PlanFileError(f"{source} is not a valid plan: {len(problems)} problems", where=where, why=why, fix=_MEND)

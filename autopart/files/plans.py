"""Plan files: JSON that people may read, compare, edit and reuse.

    {"version": 4, "provenance": {...}, "decision": {...}, "outlook": {...}}

A plan file has no checksum, since it may be edited by hand.  All problems of a file are reported at once, each with its
JSON path.  `match_plan` then refuses a plan that was made for something else, which needs the graph.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from pydantic import TypeAdapter

from autopart.files.documents import parse_json
from autopart.files.limits import MAX_BYTES, MAX_RANKS, MAX_ROWS, MOST_PROBLEMS
from autopart.files.reading import brief, listed, malformed, named, read_text, unreadable, validated
from autopart.files.storage import write_whole
from autopart.ir import plan as plan_ir
from autopart.ir.decision import AGAIN, Problem
from autopart.ir.errors import WRITABLE, PlanError, PlanFileError, printable, short_errors
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Outlook, Plan, Provenance
from autopart.launcher import torchrun_line

VERSION = 4
"""Version of the file format.  Version 3 called the outlook a report, and did not hold the simulated step."""
_MOST_FLAGS = 300
"""Changes of requires_grad flags that are tried to explain why a plan does not match; each costs a digest."""
_CORRECT = f"correct what is named, or {AGAIN}"


@dataclass(frozen=True, slots=True)
class _Document:
    """A plan file: the sections of a plan and the version of the format."""

    version: int
    provenance: Provenance
    decision: Decision
    outlook: Outlook = field(default=Outlook())


# pydantic validates the dataclasses of the IR themselves; they inherit these options.
_Document.__pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # type: ignore[attr-defined]
_DOCUMENT = TypeAdapter(_Document)
_NUMBERS = re.compile(r'([\[{])\n *((?:"\w+": )?-?\d+(?:,\n *(?:"\w+": )?-?\d+)*)\n *([\]}])')
"""A list or table of whole numbers alone, spread over lines; a line break is never inside of a text."""


def plan_to_json(plan: Plan) -> str:
    """Write the plan as indented JSON, with an op a line and numbers side by side.

    Raises PlanError for a number that JSON cannot hold.
    """
    document = asdict(_Document(VERSION, plan.provenance, plan.decision, plan.outlook))
    for stage in document["decision"]["stages"]:
        for name, usual in (("shards", 1), ("whole_backward", False)):
            if stage[name] == usual:
                del stage[name]
    for estimate in document["outlook"]["estimates"]:
        if estimate["hidden_ns"] == 0:
            del estimate["hidden_ns"]
    try:
        text = json.dumps(document, indent=2, allow_nan=False)
    except ValueError as error:
        raise PlanError("the plan cannot be written as JSON", why=str(error)) from error
    return _NUMBERS.sub(lambda found: found[1] + re.sub(r"\n *", " ", found[2]) + found[3], text) + "\n"


def plan_from_json(text: str, source: str = "<plan>") -> Plan:
    """Read a plan that `plan_to_json` wrote.  source: what messages call the text.

    Raises PlanFileError with the line (if the text is not JSON) or every wrong JSON path (if it is not a valid plan).
    """
    with named(source, PlanFileError, AGAIN):
        _check_version(parse_json(text))
        document = validated("is not a valid plan", _DOCUMENT.validate_json, text, _CORRECT)
        plan = Plan(document.provenance, document.decision, document.outlook)
        found = chain(_out_of_range(document.decision), plan_ir.problems(plan))
        if problems := list(islice(found, MOST_PROBLEMS)):
            raise malformed("is not a valid plan", problems, _CORRECT)
        return plan


def _check_version(document: object) -> None:
    if not isinstance(document, dict):
        raise unreadable("is not a plan", why="a plan is a JSON object")
    if "version" not in document:
        raise unreadable("is not a plan", where="version", why="the key is missing")
    version = document["version"]
    if type(version) is not int or version != VERSION:
        why = f"this release reads version {VERSION}"
        raise unreadable(f"has plan version {brief(version)}", where="version", why=why)


def _out_of_range(decision: Decision) -> Iterator[Problem]:
    """Yield numbers that are too large to make tables of."""
    if decision.world > MAX_RANKS:
        yield "decision.world", f"at most {MAX_RANKS} ranks are supported, not {decision.world}"
    for i, rows in enumerate(decision.micro_rows):
        if rows > MAX_ROWS:
            yield f"decision.micro_rows[{i}]", f"a micro-batch has at most {MAX_ROWS} rows, not {rows}"


@short_errors
def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file atomically.

    Raises PlanError if the plan is not valid, PlanFileError if the file cannot be written.
    """
    text = plan_to_json(plan_ir.check(plan))
    target = Path(path)
    if len(text) > MAX_BYTES:
        raise PlanFileError(f"cannot write the plan to {target}", why=f"at most {MAX_BYTES >> 10} KiB are read again")
    try:
        write_whole(target, text)
    except OSError as error:
        raise PlanFileError(f"cannot write the plan to {target}", why=str(error), fix=WRITABLE) from error


@short_errors
def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.  Raises PlanFileError."""
    with named(path, PlanFileError):
        text = read_text(path)
    return plan_from_json(text, os.fspath(path))


def match_plan(plan: Plan, graph: Graph, *, torch_version: str, world: int, local: int | None = None) -> None:
    """Refuse a plan that was made for something else than what is about to run.

    graph: captured at max(plan.micro_rows) rows.  torch_version: of the running process; major and minor must agree,
    since another release names captured ops differently.  world: number of ranks; local: on each host, None: on one
    host.  Raises PlanError with every difference, or as `ir.plan.check`.
    """
    problems = list(_mismatches(plan, graph, torch_version, world))
    if problems:
        planned = plan.decision.world
        only_world = planned != world and len(problems) == 1
        fix = torchrun_line(planned, local) if only_world and not planned % (local or 1) else AGAIN
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
    if plan.decision.world != world:
        yield f"another number of ranks: it is for {plan.decision.world}, {world} run"


def _other_structure(wanted: str, graph: Graph) -> str:
    """Say how a graph differs from the one with this digest.

    Tries other requires_grad flags for each module and for all frozen parameters.  O(modules * graph).
    """
    names = [p.name for p in graph.params if p.kind == "param"]
    frozen = tuple(p.name for p in graph.params if p.kind == "param" and not p.trainable)
    modules = dict.fromkeys(".".join(name.split(".")[:k]) for name in names for k in range(1, name.count(".") + 2))
    groups = [frozen, *(tuple(n for n in names if f"{n}.".startswith(f"{m}.")) for m in modules)]
    for group in islice(filter(None, dict.fromkeys(groups)), _MOST_FLAGS):
        params = tuple(replace(p, trainable=(p.name in group) != p.trainable) for p in graph.params)
        if replace(graph, params=params).structure_digest() == wanted:
            now = "frozen" if group[0] in frozen else "trained"
            return f"requires_grad of {brief(', '.join(group))} has changed: now {now}"
    what = "names, parameter shapes, connections or requires_grad flags differ"
    return f"{what} (digest {wanted}, not {graph.structure_digest()})"

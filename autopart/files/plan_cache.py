"""Plans made before, on disk: <cache folder>/plans/<key>.json, by everything that a plan follows from.

The key covers the graph with its costs, the capture that says how it grows, cluster, request, the version of torch and
the planner's own source, so that a plan is never older than the planner.  A file is read like any plan file, validated
and checked against the graph; what does not hold is ignored and planned anew.  A folder that cannot be written to is
no error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from autopart.costs.measure import default_cache_path
from autopart.files.plans import VERSION, load_plan, save_plan
from autopart.ir.capabilities import lacking
from autopart.ir.cluster import Cluster
from autopart.ir.errors import AutopartError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan, Provenance, check
from autopart.passes.ops.table import registered
from autopart.passes.pipeline import PlannerInput
from autopart.passes.search.space import PlanRequest

MOST = 200
"""Files that are kept, the newest."""


class PlanCache:
    """The place of one plan.  other: the capture at another number of rows, if any."""

    def __init__(self, source: PlannerInput, other: Graph | None, cluster: Cluster, request: PlanRequest) -> None:
        self._source, self._cluster, self._request = source, cluster, request
        self.path = default_cache_path().parent / "plans" / f"{_key(source, other, cluster, request)}.json"

    def get(self) -> Plan | None:
        """The plan that was made for exactly this before, if there is a valid one."""
        try:
            plan = check(load_plan(self.path), self._source.graph)
        except AutopartError:
            return None
        return plan if self._fits(plan) else None

    def put(self, plan: Plan) -> None:
        """Keep a plan, and of all that are kept the newest."""
        with suppress(AutopartError, OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_plan(plan, self.path)
            _forget(self.path.parent)

    def _fits(self, plan: Plan) -> bool:
        """Whether the file holds what its name says, as far as that can be seen; anyone may have written to it."""
        source, graph, request = self._source, self._source.graph, self._request
        made_for = Provenance(graph.shape_digest(), graph.structure_digest(), source.torch_version, source.costs)
        return (
            plan.provenance == made_for
            and plan.world == self._cluster.world
            and plan.micro_rows in request.micro_rows
            and plan.schedule in request.schedules
            and request.stages in (None, len(plan.stages))
            and not lacking(plan, request.abilities)
        )


def _key(source: PlannerInput, other: Graph | None, cluster: Cluster, request: PlanRequest) -> str:
    texts = [
        f"plan {VERSION}, autopart {_release()} {_planner()}, torch {source.torch_version}, costs {source.costs}",
        _text(source.graph),
        _text(other) if other is not None else "one capture",
        repr(cluster),
        repr(request),
        repr(registered()),
    ]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _text(graph: Graph) -> str:
    """A fingerprint of the graph: shapes and connections, and what `shape_digest` leaves out but the planner reads."""
    ops = [(op.module, op.random, op.parts, astuple(op.cost)) for op in graph.ops]
    values = [(v.size_bytes, v.rows_axis) for v in graph.values]
    rest = json.dumps([ops, values, [p.size_bytes for p in graph.params]], separators=(",", ":"))
    return f"{graph.shape_digest()} {hashlib.sha256(rest.encode()).hexdigest()}"


def _release() -> str:
    try:
        return metadata.version("autopart")
    except metadata.PackageNotFoundError:
        return "as source"


@lru_cache(maxsize=1)
def _planner() -> str:
    """A digest of the code that makes plans."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    home = Path(__file__).resolve().parents[1]
    for room in ("ir", "passes"):  # a link is not followed unless it is resolved first
        yield from sorted((home / room).resolve().rglob("*.py"))


def _forget(folder: Path) -> None:
    """Remove the oldest files above the limit; another process may do so at the same time."""
    aged = []
    for path in folder.glob("*.json"):
        with suppress(OSError):
            aged.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(aged)[: max(0, len(aged) - MOST)]:
        with suppress(OSError):
            os.unlink(path)

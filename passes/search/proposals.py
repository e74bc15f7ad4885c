"""Drafts: for every way to cut the batch and every layout, the partition's best division for each number of stages.

A pipeline deeper than `SMALL` is cut out of a line of many blocks, and most of its dynamic program is about stages far
too long to be in any good plan.  So ways and layouts come in order of a bound of their divisions; what is hopeless
against the best U so far is left out, and ranges longer than a worthwhile U allows are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from autopart.passes.search.evaluation import Candidate
from autopart.passes.search.layout import SMALL, Layout, layouts
from autopart.passes.search.partition import INFEASIBLE, Partition, solve_partition
from autopart.passes.search.relaxation import gradient_edges, is_chain, layout_bound, longest_range
from autopart.passes.search.space import SearchSpace
from autopart.passes.search.tables import StageCostTables

HOPELESS = 1.1
"""A division whose U is so much above the best simulated step is not judged: U leaves waiting out."""
WORTH = 1.5
"""A division of a deep pipeline whose U is so much above the best U is not looked for, unless nothing better fits."""
MOST_STAGES = 128
"""Unless more are asked for."""
MOST_WAYS = 8
"""Ways to cut the batch that get dynamic programs; the others are tried in refinement."""

Watch = Callable[[str, int, int], None]
"""(pass, best step so far in ns or 0, lower bound in ns or 0)."""
Proposal = tuple[SearchSpace, Candidate]


def proposals_of(
    spaces: tuple[SearchSpace, SearchSpace], watch: Watch | None, *, roomy: bool = False, worth: float = WORTH
) -> list[Proposal]:
    """The divisions that the dynamic programs find, but for those that cannot be the best; in the order of the request.

    roomy: as if memory had no end.  worth: how far above the best U a division of a deep pipeline may be.  While no U
    is known, deep pipelines are tried below a limit that doubles: the lower it is, the shorter the ranges.
    """
    hunt = _ProposalSearch(spaces, roomy, watch)
    hunt.try_all(deep=False, limit=math.inf)
    low = min((field.bound for fields in hunt.fields for field in fields if field.deep), default=0)
    limit = worth * (hunt.least or max(1, low))
    while not hunt.try_all(deep=True, limit=limit) and not hunt.least:
        limit *= 2
    if limit < worth * hunt.least:
        hunt.try_all(deep=True, limit=worth * hunt.least)
    return [draft for key in sorted(hunt.found) for draft in hunt.found[key]]


class _ProposalSearch:
    """Ways to cut the batch, the layouts for each in order of their bounds, and what was found so far.

    found: by way and place of the layout.  least: the best U, 0 while there is none.
    """

    def __init__(self, spaces: tuple[SearchSpace, SearchSpace], roomy: bool, watch: Watch | None) -> None:
        self._roomy, self._watch = roomy, watch
        self._ways = _spread(spaces[0].request.micro_rows)
        self.fields = [sorted(_fields(spaces, micro_rows), key=lambda f: f.bound) for micro_rows in self._ways]
        self.found: dict[tuple[int, int], list[Proposal]] = {}
        self.least = 0

    def try_all(self, *, deep: bool, limit: float) -> bool:
        """Look for divisions with U up to a limit.  True when none was left out because of it."""
        whole = True
        order = sorted(range(len(self._ways)), key=lambda i: min((f.bound for f in self.fields[i]), default=0))
        for way in order:
            shared: dict[object, Any] = {}
            for field in self.fields[way]:
                hopeless = self.least and field.bound > HOPELESS * self.least
                if field.deep == deep and (not hopeless or field.explains):
                    whole &= self._try(way, field, shared, limit)
            if self._watch:
                kind = "deep pipelines, " if deep else ""
                self._watch(f"partition, {kind}micro-batches of {max(self._ways[way])} rows", 0, 0)
        return whole

    def _try(self, way: int, field: _LayoutTask, shared: dict[object, Any], limit: float) -> bool:
        micro_rows, space = self._ways[way], field.space
        length = space.chain.n
        if limit < INFEASIBLE:
            length = longest_range(space, -(-max(micro_rows) // field.layout.copies), len(micro_rows), int(limit))
        divisions = [
            division
            for loose in ((False,) if is_chain(space) else (False, True))
            for division in _divisions(space, field.layout, micro_rows, shared, self._roomy, loose, length)
            if division.value <= limit
        ]
        schedule = space.request.schedules[0]
        self.found[way, field.place] = [(space, Candidate(d, field.layout, micro_rows, schedule)) for d in divisions]
        self.least = min([d.value for d in divisions] + [self.least] * (self.least > 0), default=0)
        return length == space.chain.n


class _LayoutTask(NamedTuple):
    """A layout, its place among the layouts, the line that is cut for it, and the bound of its divisions."""

    bound: int
    place: int
    space: SearchSpace
    layout: Layout

    @property
    def deep(self) -> bool:
        """Whether the line of many blocks is cut, into stages of one device in each copy."""
        return self.layout.depth > SMALL

    @property
    def explains(self) -> bool:
        """Whether its divisions are wanted for comparison: pipelines without replicas, where they cost little."""
        return self.layout.copies == 1 and not self.deep


def _fields(spaces: tuple[SearchSpace, SearchSpace], micro_rows: tuple[int, ...]) -> list[_LayoutTask]:
    """One layout for each number of copies and order of the devices: the one with replicas together."""
    fields = []
    for place, layout in enumerate(layouts(spaces[0].costs.cluster, replicas=spaces[0].request.may_replicate)):
        if layout.inner == layout.copies <= max(micro_rows):
            space = spaces[1] if layout.depth > SMALL else spaces[0]
            most = space.request.stages or MOST_STAGES
            fields.append(_LayoutTask(layout_bound(space, layout, micro_rows, most), place, space, layout))
    return fields


def _spread(ways: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """At most `MOST_WAYS`, with numbers of micro-batches about a constant factor apart, both ends included."""
    if len(ways) <= MOST_WAYS:
        return list(ways)
    order = sorted(ways, key=len)
    low, high = math.log(len(order[0])), math.log(len(order[-1]))
    marks = [low + (high - low) * i / (MOST_WAYS - 1) for i in range(MOST_WAYS)]
    chosen = {min(range(len(order)), key=lambda i: abs(math.log(len(order[i])) - mark)) for mark in marks}
    return [order[i] for i in sorted(chosen)]


def _divisions(
    space: SearchSpace,
    layout: Layout,
    micro_rows: tuple[int, ...],
    shared: dict[object, Any],
    roomy: bool,
    loose: bool,
    length: int,
) -> list[Partition]:
    """loose: branches of the graph may run side by side, so that only what a stage reads has to come before it.
    length: of the longest range."""
    request, waits = space.request, gradient_edges(space) if loose else None

    def tables_of(stages: int | None) -> StageCostTables:
        return StageCostTables(
            space, layout, micro_rows, request.schedules[0], stages, shared, roomy=roomy, waits=waits, length=length
        )

    if not request.pins and request.replicas is None:
        most, spare = request.stages or min(MOST_STAGES, layout.depth), _spare(space, layout, 1)
        found = solve_partition(space.chain.n, layout.depth, layout.widths, most, tables_of(None), spare=spare)
        return [d for d in found if request.stages in (None, d.stages)]
    found = []
    counts = [request.stages] if request.stages else range(1, min(MOST_STAGES, layout.depth, space.chain.n) + 1)
    for stages in counts:  # what is asked of a stage by its number needs the number of stages
        spare = _spare(space, layout, stages)
        divisions = solve_partition(space.chain.n, layout.depth, layout.widths, stages, tables_of(stages), spare=spare)
        found += [d for d in divisions if d.stages == stages]
    return found


def _spare(space: SearchSpace, layout: Layout, stages: int) -> int:
    """Positions that may idle at the end: where devices are not alike, which of them idle matters."""
    alike = len(set(space.costs.cluster.devices)) == 1
    return 0 if alike or layout.depth > SMALL else layout.depth - stages

"""Shares of unlike devices: rows in proportion to how fast each of them runs the stage.

Rows are dealt out one at a time, each to the device that would be done first with it, which makes the slowest of them
as fast as it can be where time grows with the rows (Graham's list scheduling of equal jobs on unlike machines).

Assumed, and wrong where: a row takes a device as long in a small part as in a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

import numpy as np

from autopart.ir.plan import Decision, Stage
from autopart.ir.shares import MOST_SHARES
from autopart.ir.size import Size
from autopart.passes.graph.cuts import Ints
from autopart.passes.simulation.stage_costs import Estimator


def dealt_out(rows: int, row_ns: Sequence[int]) -> tuple[int, ...]:
    """Rows of each device, at least one; row_ns: nanoseconds that each needs for a row.  O(rows log devices)."""
    found = [1] * len(row_ns)
    queue = [(2 * taken, place) for place, taken in enumerate(row_ns)]
    heapify(queue)
    for _ in range(rows - len(found)):
        end, place = heappop(queue)
        found[place] += 1
        heappush(queue, (end + row_ns[place], place))
    return tuple(found)


def in_proportion(decision: Decision, estimator: Estimator) -> Decision:
    """The decision with the rows of each stage on unlike devices in proportion to their speed; itself where there are
    none, or fewer rows than devices.  O(uses + rows log devices)."""
    rows = max(decision.micro_rows)
    return replace(decision, stages=tuple(_in_proportion(stage, rows, estimator) for stage in decision.stages))


def _in_proportion(stage: Stage, rows: int, estimator: Estimator) -> Stage:
    setting = estimator.context
    kinds = [setting.device_types.index(setting.cluster.devices[rank]) for rank in stage.ranks]
    if len(set(kinds)) == 1 or rows < len(kinds) or not stage.division.splits:
        return stage
    size = Size(stage.division.largest_part(rows))
    taken = {}
    for kind in set(kinds):
        ops = estimator.graph(size, kind).ops
        taken[kind] = max(1, sum(ops[name].cost.total_ns for name in stage.ops))
    shares = dealt_out(min(rows, MOST_SHARES), [taken[kind] for kind in kinds])
    return stage if len(set(shares)) == 1 else replace(stage, shares=shares)


def by_speed(times: list[Ints]) -> Ints:
    """Nanoseconds of devices that divide their rows by speed, from those of each with an equal share."""
    if len(times) == 1:
        return times[0]
    rates = sum(1 / np.maximum(each, 1) for each in times)
    return np.ceil(np.where(np.max(times, axis=0) > 0, len(times) / rates, 0)).astype(np.int64)

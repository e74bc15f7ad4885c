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
from autopart.ir.shares import MOST_SHARES, division, parts
from autopart.ir.size import Size
from autopart.passes.graph.cuts import Ints
from autopart.passes.simulation.stage_costs import Estimator


def dealt_out(rows: int, row_ns: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Rows of each device, at least `least`; row_ns: nanoseconds that each needs for a row.  O(rows log devices)."""
    found = [least] * len(row_ns)
    queue = [((least + 1) * taken, place) for place, taken in enumerate(row_ns)]
    heapify(queue)
    for _ in range(rows - sum(found)):
        end, place = heappop(queue)
        found[place] += 1
        heappush(queue, (end + row_ns[place], place))
    return tuple(found)


def in_proportion(decision: Decision, estimator: Estimator, least_rows: int = 1) -> Decision:
    """The decision with the rows of each stage on unlike devices in proportion to their speed; itself where there are
    none, or too few rows for `least_rows` on each.  O(uses + rows log devices)."""
    stages = tuple(_in_proportion(stage, decision.micro_rows, estimator, least_rows) for stage in decision.stages)
    return replace(decision, stages=stages)


def _in_proportion(stage: Stage, micro_rows: Sequence[int], estimator: Estimator, least_rows: int) -> Stage:
    setting, rows = estimator.context, max(micro_rows)
    kinds = [setting.device_types.index(setting.cluster.devices[rank]) for rank in stage.ranks]
    if len(set(kinds)) == 1 or rows < least_rows * len(kinds) or not stage.division.splits:
        return stage
    size = Size(stage.division.largest_part(rows))
    taken = {}
    for kind in set(kinds):
        ops = estimator.graph(size, kind).ops
        taken[kind] = max(1, sum(ops[name].cost.total_ns for name in stage.ops))
    shares = dealt_out(min(rows, MOST_SHARES), [taken[kind] for kind in kinds], least_rows)
    divided = division(len(kinds), shares)
    too_few = any(0 < own < least_rows for each in set(micro_rows) for own in parts(divided, 0, each))
    return stage if len(set(shares)) == 1 or too_few else replace(stage, shares=shares)


def by_speed(times: list[Ints]) -> Ints:
    """Nanoseconds of devices that divide their rows by speed, from those of each with an equal share."""
    if len(times) == 1:
        return times[0]
    rates = sum(1 / np.maximum(each, 1) for each in times)
    return np.ceil(np.where(np.max(times, axis=0) > 0, len(times) / rates, 0)).astype(np.int64)

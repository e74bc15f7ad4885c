"""How fast each rank computes relative to its plan, and to its own first steps: which devices are stragglers.

Assumes that the plan's times are right up to a factor that all ranks share; so a rank is judged relative to the others.
Where all ranks are about as fast as planned at first, what is left is the error of the plan's costs of each stage, and
from then on ranks are judged relative to those first steps.  Wrong where a plan's costs are far wrong for one stage
alone: that stage is taken for slow, by the same factor, and a new plan gives it less, which is right too.

What the host does for each compute besides its ops is in no plan's times, and all there is of a tiny stage: differences
that it explains are not counted.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device
from autopart.ir.plan import Plan
from autopart.ir.shares import Division
from autopart.session.executors.step_end import StepEnd
from autopart.session.ranks.listener import Listener
from autopart.state.core import Core, Part

WINDOW, RECENT, SKIPPED = 8, 5, 2
"""Steps by whose median a rank is named, the newest of them, which say how slow it is (when more than half of the
steps are slow, all of these are), and the first ones under a plan, in which caches and pages are cold."""
SLOW, CHANGED = 2.0, 1.5
"""Report a rank once it is this many times slower, or faster, than planned, or than in its first steps."""
_log = logging.getLogger("autopart")


class Speeds(Part, Listener):
    """The part of a pipe that finds slow devices in its steps: the measured slowness of each rank under the plan that
    runs; alike on all ranks, since all note the same."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._before: Sequence[float] = ()  # what was judged before the plan that is being made
        self._planned: tuple[float, ...] = ()
        self._beside: tuple[float, ...] = ()  # nanoseconds of a step that the host may take besides the ops
        self._known: tuple[float, ...] = ()
        self._judged: tuple[float, ...] = ()
        self._usual: tuple[float, ...] = ()
        self._shards = 1
        self._rows: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self._left = SKIPPED
        self._told: frozenset[int] = frozenset()

    @property
    def listeners(self) -> Sequence[Listener]:
        """The speeds follow plans and steps."""
        return (self,)

    def brought_up(self, plan: Plan) -> None:
        """Begin again under a plan that takes no rank for slow."""
        self.follow(plan, self.core.cluster)

    def follow(self, plan: Plan, cluster: Cluster, known: Sequence[float] = ()) -> None:
        """Begin again under a plan for a cluster.  known: how slow the plan takes each rank for; () for 1 each."""
        self._planned, self._shards = planned_ns(plan, cluster), plan.decision.shards
        self._beside = beside_ns(plan, cluster)
        self._known = self._judged = tuple(known) or (1.0,) * cluster.world
        self._usual = ()
        self._restart()

    def now(self, cluster: Cluster) -> Cluster:
        """Return the cluster with devices that are slow; ranks are named again only for a change.

        Ranks that divide the work of a stage wait for each other in every op, so each is as slow as the slowest of its
        group: the number that runs, and was asked for, then fits this cluster too."""
        self._judged = self._before = self.slowness()
        self._restart()
        starts = (rank - rank % self._shards for rank in range(cluster.world))
        return slowed(cluster, [max(self._judged[first : first + self._shards]) for first in starts])

    def replanned(self) -> None:
        """Begin again with a plan that takes devices for as slow as they were judged."""
        self.follow(self.core.session.plan, slowed(self.core.cluster, self._before), self._before)

    def _restart(self) -> None:
        self._rows.clear()
        self._left, self._told = SKIPPED, frozenset()

    def step_ended(self, end: StepEnd) -> None:
        """Note what each rank computed for in a step, if all have told.  O(ranks * window)."""
        if not end.computed_ns:
            return
        if self._left:
            self._left -= 1
            return
        self._rows.append(end.computed_ns)
        found = self.stragglers()
        if not found and not self._usual and len(self._rows) == WINDOW:
            measured = self._measured(list(self._rows)[-RECENT:])
            self._usual = tuple(slow / judged for slow, judged in zip(measured, self._judged, strict=True))
        new = frozenset(found) - self._told
        self._told = self._told | new
        for rank in sorted(new):
            _log.log(
                logging.INFO if self.core.session.world.rank else logging.WARNING,  # all ranks know it; one says it
                "rank %d takes %.1f times as long for its computes as its device should, relative to the other ranks: "
                "pipe.replan(optimizer, steps=...) looks for a plan that fits", rank, found[rank],
            )  # fmt: skip

    def slowness(self) -> tuple[float, ...]:
        """Return how slow each rank is; what was known before where it is not measured yet, or has no stage."""
        return self._slowness(list(self._rows)[-RECENT:]) if len(self._rows) == WINDOW else self._judged

    def stragglers(self) -> Mapping[int, float]:
        """Ranks whose computes take at least twice as long as planned, compared with the other ranks, or 1.5 times as
        long as in their first steps under the plan, and how many times as long.

        A rank is named by the median of its last eight steps, its slowness is that of the newest five.  Ranks that have
        become so much faster since the last `replan`, which judges them all, are named too.  Alike on all ranks, and a
        warning of rank 0 names them.  Measured in `step` on CPUs."""
        if len(self._rows) < WINDOW:
            return {}
        limit = CHANGED if self._usual else SLOW
        found = {}
        for rank, (slow, lately) in enumerate(zip(self._slowness(list(self._rows)), self.slowness(), strict=True)):
            changes = [each / self._judged[rank] for each in (slow, lately)]
            if min(changes) >= limit or max(changes) <= 1 / limit:
                found[rank] = lately
        return found

    def _slowness(self, rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Return how slow each rank was in these steps; as judged where the host alone may make the difference."""
        found = []
        for rank, slow in enumerate(self._measured(rows)):
            judged, took = self._judged[rank], statistics.median_low(row[rank] for row in rows)
            found.append(slow if abs(1 - judged / slow) * took > self._beside[rank] else judged)
        return tuple(found)

    def _measured(self, rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Return how many times as long as planned each rank took in these steps, relative to the middle one."""
        working = [rank for rank, planned in enumerate(self._planned) if planned > 0]
        medians = [statistics.median_low(column) for column in zip(*rows, strict=True)]
        if len(working) < 2 or not all(medians[rank] > 0 for rank in working):
            return self._judged
        usual = self._usual or (1.0,) * len(self._known)
        slow = {rank: self._known[rank] * medians[rank] / self._planned[rank] / usual[rank] for rank in working}
        middle = statistics.median_low(slow.values())
        return tuple(slow[rank] / middle if rank in slow else known for rank, known in enumerate(self._known))


def planned_ns(plan: Plan, cluster: Cluster) -> tuple[float, ...]:
    """Return the nanoseconds for which each rank computes in a step of a plan, 0 for one without stages; all 0 if the
    plan has no estimates.  Estimates are those of the slowest device of a stage; others take their part of that."""
    found = [0.0] * cluster.world
    if not plan.outlook.estimates or len(plan.outlook.estimates) != len(plan.stages):
        return tuple(found)
    for stage, estimate in zip(plan.stages, plan.outlook.estimates, strict=True):
        parts = _parts(stage.division, [cluster.devices[rank] for rank in stage.ranks])
        for rank, part in zip(stage.ranks, parts, strict=True):
            found[rank] += (estimate.fwd_ns + estimate.bwd_ns) * part * len(plan.micro_rows) / stage.division.period
    return tuple(found)


def beside_ns(plan: Plan, cluster: Cluster) -> tuple[float, ...]:
    """Return the nanoseconds that the hosts may take for the computes of a step besides their ops, by rank."""
    found = [0.0] * cluster.world
    for stage in plan.stages:
        computes = 2 * plan.decision.slices * len(plan.micro_rows) / stage.division.period
        for rank in stage.ranks:
            found[rank] += computes * DEVICE_KINDS[cluster.kind].compute_ns
    return tuple(found)


def _parts(division: Division, devices: Sequence[Device]) -> list[float]:
    """Return the time of each device for its share, relative to the slowest device."""
    each = division.shares if division.splits else (1,) * (len(devices) // division.shards)
    shares = [share for share in each for _ in range(division.shards)]
    times = [share / device.flops_per_s for share, device in zip(shares, devices, strict=True)]
    return [time / max(times) for time in times]


def slowed(cluster: Cluster, slowness: Sequence[float]) -> Cluster:
    """Return the cluster with devices as slow as they were measured; small differences are left out."""
    return cluster.with_speeds([1.0 if 1 / CHANGED < slow < CHANGED else 1 / slow for slow in slowness])

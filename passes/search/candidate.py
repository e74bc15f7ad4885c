"""Candidates: the choices of the search, and by what one plan is preferred to another.

A candidate lays its positions over the cluster (`layout`) and cuts the chain into `per_rank` stages for each of them.
With three positions and two stages each:

    loop   positions 0 1 2 0 1 2   (Megatron's interleaved schedule, SC 2021, section 2.2)
    v      positions 0 1 2 2 1 0   (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024); with
                                   more stages on and on there and back
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import log2
from typing import NamedTuple

from autopart.ir.cluster import DEVICE_KINDS
from autopart.passes.program.orders import ONE, placed
from autopart.passes.program.schedules import find
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import SearchSpace, is_other

DOUBLING = 0.02
"""A plan with twice the stages is chosen if it makes the step shorter by at least this part: predicted steps are off by
more than that from measured ones (benchmarks/results/prediction.json), while each stage is one more hop for every
micro-batch, and one more device that all others wait for.  For 15 stages instead of 16 it is 0.2 %."""
OTHER_ORDER = 0.02
"""A schedule that is not of 1F1B's family is chosen if it saves at least this part of the step."""


@dataclass(frozen=True)
class Candidate:
    """The choices of the search; memory decides the rest.

    bounds, widths, latency_ns, first: those of a `Partition`; widths are those of positions.  per_rank: stages of each
    position.  placement: ONE, LOOP or V.  order: computes of each worker (`Decision.order`); (): the schedule's own.
    recompute: the groups of each stage with which the order was found; (): as memory demands.
    """

    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    latency_ns: int
    first: int
    layout: Layout
    micro_rows: tuple[int, ...]
    schedule: str
    token_slices: tuple[int, ...] = ()
    per_rank: int = 1
    placement: str = ONE
    order: tuple[str, ...] = ()
    recompute: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that are the same plan."""
        return self.bounds, self.ranks, self.micro_rows, self.schedule, self.token_slices, self.order

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.widths) * self.per_rank

    def preference(self, step_ns: int, kind: str) -> float:
        """Return the criterion by which plans are chosen, less is better.

        It is the step, with a penalty for each doubling of the stages, and for a schedule that is not of 1F1B's family
        one for its further computes and another one.  kind: of device.
        """
        if not self.other_order:
            return float(step_ns * (1 + DOUBLING) ** log2(self.stages))
        each = self.per_rank * (3 if find(self.schedule).splits else 2)
        more_ns = len(self.micro_rows) * (each - 2) * DEVICE_KINDS[kind].compute_ns
        return float((step_ns + more_ns) * (1 + DOUBLING) ** log2(self.stages) * (1 + OTHER_ORDER))

    @property
    def other_order(self) -> str:
        """Its schedule if that is not of 1F1B's family (`orders`), else ""."""
        return self.schedule if is_other(self.schedule) else ""

    @property
    def most_replicas(self) -> int:
        """The devices of the stage that has most."""
        return self.layout.pipeline_replicas * max(self.widths)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage."""
        starts = accumulate(self.widths, initial=self.first)
        ranks = [self.layout.ranks(start, width) for start, width in zip(starts, self.widths, strict=False)]
        homes = placed(self.placement, self.stages, len(ranks)) or range(len(ranks))
        return tuple([ranks[home] for home in homes])


class Proposal(NamedTuple):
    """A candidate and the space whose blocks it cuts."""

    space: SearchSpace
    candidate: Candidate

"""A plan that begins behind the frozen layers, and what keeping their activations costs beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopart.extras.freezing.kept.activations import AutoCache, activations_of
from autopart.extras.freezing.kept.code import frozen_code
from autopart.ir.cluster import Cluster
from autopart.ir.errors import AutopartError, RefusedError, UsageError
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.passes.program.schedules import find
from autopart.planning.make import Planned, make_plan
from autopart.session.session import Session
from autopart.session.step.parts import micro_cut

Specs = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each value that a plan begins with, for the batch that was planned for."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A plan that begins behind the frozen layers.

    kept: the values that it begins with, of the batch that it was made for.  reading_s, computing_s: seconds that a
    rank takes in a step to read them, and to compute them instead.  hits: the part of the samples that fits.  first:
    steps until each sample came once, 0 if that is not known.
    """

    planned: Planned
    kept: tuple[tuple[str, torch.Tensor], ...]
    reading_s: float
    computing_s: float
    hits: float
    first: int

    @property
    def beside_s(self) -> float:
        """Seconds of a step for activations, once each sample that fits is kept."""
        return self.hits * self.reading_s + (1 - self.hits) * self.computing_s

    def once_s(self, steps: int) -> float:
        """Seconds more that the steps take in which the samples come for the first time."""
        return min(self.first, steps) * max(0.0, self.computing_s - self.beside_s)

    @property
    def specs(self) -> Specs:
        """The values without numbers, for ranks that plan nothing."""
        return tuple((n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self.kept)


def zeros(specs: Specs) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return values without numbers, for ranks that plan nothing."""
    return tuple((name, torch.zeros(shape, dtype=getattr(torch, dtype))) for name, shape, dtype in specs)


def behind_frozen(session: Session, cluster: Cluster, cache: AutoCache, options: Options) -> Behind | str:
    """Return the best plan that begins behind the frozen layers, or why there is none.  Local, on rank 0.

    Computes the values twice for the batch that was planned for, and reads them once.  Raises RefusedError if the
    frozen layers are no function of each sample alone, and UsageError with schedules and slices that know no cache.
    """
    captures, batch = session.captures, session.batch.plain
    _refuse_options(options)
    code = frozen_code(captures, batch, max(session.plan.micro_rows), session.world.device)
    if not code.values:
        return "no layer is frozen whose activations could be kept"
    if any(code.captured.tensors[name].is_meta for name in code.tensors):
        return "rank 0 has no values of some frozen layers, which the planner would time"
    begun, computing_s, reading_s = activations_of(session).tried(batch, code, cache)
    try:
        planned = make_plan(captures, begun, cluster, options)
    except RefusedError:
        raise
    except AutopartError as error:  # an option may name a layer that is not planned any more
        return f"without the frozen layers there is no plan: {error}"
    weights = sum(code.captured.tensors[name].nbytes for name in code.tensors)
    peak = max((estimate.peak_bytes for estimate in planned.plan.estimates), default=0)
    if peak + weights > cluster.least_memory_bytes((0,)):
        return "the ranks that are given data have no memory for the frozen layers"
    rows = batch.rows or 1
    share = _largest_share(planned.plan, rows)
    size = sum(tensor.nbytes for _, tensor in begun.kept) / rows
    room = (cache.memory_bytes + cache.disk_bytes) * len(planned.plan.stages[0].ranks) / size
    hits = 1.0 if cache.samples is None else min(1.0, room / cache.samples)
    first = 0 if cache.samples is None else -(-cache.samples // rows)
    return Behind(planned, begun.kept, reading_s * share, computing_s * share, hits, first)


def _refuse_options(options: Options) -> None:
    if options.schedule != "auto" and not find(options.schedule).synchronous:
        raise UsageError(
            f"activations cannot be kept under schedule {options.schedule!r}",
            why="its batches enter through pipe.train, which takes no names of samples",
            fix="compile with a synchronous schedule, or leave cache= out of pipe.replan",
        )
    if options.token_slices is not None:
        raise UsageError(
            "activations cannot be kept while sequences are cut into slices",
            fix="compile without token_slices=, or leave cache= out of pipe.replan",
        )


def _largest_share(plan: Plan, rows: int) -> float:
    """Return the largest part of the rows of a batch that one rank of the first stage has."""
    division = plan.stages[0].division
    windows = [division.windows(micro, own) for micro, own in enumerate(micro_cut(rows, plan.micro_rows))]
    shares = [sum(window.end - window.first for window in of_rank) for of_rank in zip(*windows, strict=True)]
    return float(max(shares)) / rows

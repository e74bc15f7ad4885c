"""A plan and this rank's stages for it, made together with the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache
from autopart.ir.cluster import Cluster
from autopart.ir.graph import Size
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.passes.program.routing import homes
from autopart.planning.derive.reduction import BatchRule
from autopart.planning.make import Planned, make_plan
from autopart.runtime.activity import patient
from autopart.runtime.group.world import World
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.tensors import LocalTensors, Values, like, require_equal_values, without_values
from autopart.session.executors.context import RankContext
from autopart.session.executors.executor import Executor
from autopart.session.lists import WeightSource
from autopart.session.placement import placement_of
from autopart.session.ranks.agreement import from_rank, require_same_everywhere, together


class Maker:
    """Makes what a rank has under a plan, before anything of the plan that runs is changed.

    seconds: that capturing and making the stages took since the last `plan`."""

    def __init__(self, world: World, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        self._world, self._captures, self._cluster, self._options = world, captures, cluster, options
        self.seconds = 0.0

    def plan(self, batch: Batch, options: Options | None = None) -> tuple[Planned, Batch]:
        """Return the plan of rank 0 for a batch, on every rank with its own capture, and the batch as captures judge
        it.  Collective; an error is raised on all ranks.  options: to plan by, None for those of the session."""
        mine: Planned | None = None
        options = options or self._options

        def made() -> tuple[Plan, BatchRule]:
            nonlocal mine
            with patient("planning"):
                mine = make_plan(self._captures, batch, self._cluster, options)
            return mine.plan, mine.rule

        decided, rule = from_rank(self._world, 0, "planning", made)
        began = time.perf_counter()
        with together(self._world, "capturing the model"), patient("capturing the model"):
            if mine is None:
                comes = self._options.weights is not None
                self._captures.run_in(
                    decided.provenance.precision, self._cluster.devices[0].device_type, values_come=comes
                )
                mine = Planned(decided, self._captures(batch, Size(max(decided.micro_rows))), rule)
            batch = self._captures.judged(batch)
            fingerprint = (
                f"{mine.captured.graph.shape_digest()} {mine.plan.digest()} {options.seed} {options.master_weights}"
            )
        require_same_everywhere(self._world, fingerprint)
        self.seconds = time.perf_counter() - began
        return mine, batch

    def context(
        self, planned: Planned, earlier: RankContext | None = None, values: Values = without_values
    ) -> RankContext:
        """Return what executors share under a plan.  earlier: under the plan before.  values: of tensors on the meta
        device.  Collective."""
        graph, decision = planned.captured.graph, planned.plan.decision
        used = placement_of(graph, decision)
        placement = used.with_unused(earlier.placement) if earlier is not None else used
        rank, wanted = self._world.rank, self._options.master_weights
        mastered: Callable[[str], bool] = lambda name: wanted and placement.keeps(rank, name)  # noqa: E731
        before, piece = earlier.tensors if earlier else None, partial(placement.piece, rank)
        tensors = LocalTensors(self._world.device, before, mastered, values, piece)
        mine = decision.stages_of_rank(rank)
        tensors.hold([name for name, home in homes(decision, graph).items() if home in mine], planned.captured.tensors)
        if rank in planned.plan.stages[0].ranks:
            tensors.hold(graph.before, planned.captured.tensors)
        unused = placement.holders.keys() - used.holders.keys()
        tensors.hold([piece.name for piece in unused if rank in placement.holders[piece]], planned.captured.tensors)
        shared = SharedValues(self._world, placement.sharing, tensors.held)
        return RankContext(self._world, self._captures, tensors, placement, shared, self._options)

    def executor(self, planned: Planned, context: RankContext, batch: Batch) -> Executor:
        """Return the executor of the batches that a plan is for.  Collective."""
        began = time.perf_counter()
        with together(self._world, "making the stages"), patient("making the stages"):
            executor = Executor("step", context, planned.captured, planned.plan.decision, planned.rule)
            executor.preparation.prepare(batch, (max(planned.plan.micro_rows),))
        if self._world.carrier is not None:  # opens all channels before the first step
            executor.engine(len(planned.plan.micro_rows))
        self.seconds += time.perf_counter() - began
        return executor

    def complete(self, weights: WeightSource, context: RankContext) -> None:
        """Give the model values of what no stage uses, and compare what several ranks have.  Collective."""
        placement, device = context.placement, self._world.device
        with together(self._world, "making the weights"):
            unused = {name: t for name, t in weights.wanted.items() if placement.owner(name) is None}
            for name, value in weights.values(unused, device).items():
                torch.utils.swap_tensors(unused[name], value)  # type: ignore[no-untyped-call]
        held = {name: (placement.piece(self._world.rank, name), t) for name, t in context.tensors.held.items()}
        shared = {name: t for name, (piece, t) in held.items() if len(placement.holders.get(piece, ())) > 1}
        require_equal_values(self._world, {n: t for n, t in {**shared, **unused}.items() if n in weights.wanted})

    def empty(self, wanted: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return memory for tensors that come from other ranks."""
        return {name: like(tensor, self._world.device) for name, tensor in wanted.items()}

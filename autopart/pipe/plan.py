"""The plan of a pipe: what runs where, and going on under another one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

from autopart.capture import CaptureCache
from autopart.extras.asynchronous.training import Training
from autopart.extras.elastic.speeds import Speeds, slowed
from autopart.extras.freezing.carried import carrying
from autopart.extras.freezing.kept.activations import AutoCache
from autopart.extras.freezing.replan import Replanned, replan, state_bytes_of
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.options import Options
from autopart.pipe.state import PipeState
from autopart.report.plan_table import stage_table
from autopart.session.session import Preparing
from autopart.state.contents import driven_names
from autopart.state.misuse_guards import short_tracebacks
from autopart.state.optimizers import GivenOptimizer, given_as


@short_tracebacks
class PipePlan(PipeState):
    """The plan that a pipe runs, and its changes."""

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        super().__init__(captures)
        self._cluster = cluster
        self._options = options
        self._training: Training | None = None
        self._speeds = Speeds(cluster)

    @property
    def cluster(self) -> Cluster:
        """The cluster that was planned for."""
        return self._cluster

    @property
    def program(self) -> Program:
        """The actions of every rank in one training step."""
        return self.session.standing.program()

    def explain(self) -> str:
        """Return the stage table: what runs where, with simulated times and memory; then the captures of this rank."""
        _, plan, graph = self._facts
        return f"{stage_table(plan, graph)}captures of this rank: {self._captures.kept}, {self._captures.made} made\n"

    def adopt(self, plan: Plan | str | os.PathLike[str], optimizer: GivenOptimizer = None) -> None:
        """Continue under another plan for the same model, batch and number of ranks.

        Call it between two steps, on every rank; rank 0's plan is used.  Weights, buffers and accumulated gradients
        move to the ranks that need them, and `parameters()` yields others afterwards.

        optimizer: this rank's, or a list of them; they stay the same objects, with their groups.  Their state moves
        directly from rank to rank, and schedulers continue.  Without it make a new optimizer from `parameters()`: the
        old one is refused if this rank now has other parameters.

        A plan that does not fit raises PlanError or UsageError, and nothing changes.  A running `train` is flushed, and
        ended by another plan.
        """
        self.session.adopt(plan, self._preparing(optimizer))

    def replan(
        self,
        optimizer: GivenOptimizer = None,
        *,
        steps: int | None = None,
        cache: AutoCache | None = None,
    ) -> Replanned:
        """Make a new plan for the model in its current state, and continue under it if it pays.  Call it on every rank.

        For example after layers were frozen: they need no backward, so fewer stages and more replicas may be faster on
        the same ranks.  The options of `compile` apply, except a plan that was passed there.

        Devices that are slower than planned (`stragglers`) count as slow, so that they get fewer rows or ops.

        optimizer: as for `adopt`.  steps: training steps that remain.  A plan is adopted if the time that it saves in
        these steps, by simulation, exceeds the time of the change: capturing, making stages, and moving weights and
        optimizer state, which is timed by sending a part of them.  Without steps a plan is adopted if its simulated
        step is 2 % shorter.

        cache: where the activations of frozen layers may be kept by sample, on the ranks that are given data; it holds
        for later calls too.  If that pays, the plan begins behind the frozen layers, and `step(batch, samples=names)`
        reads what they make of each sample instead of computing it.

        Returns what was found and done (`Replanned`); its `reason` explains it.  Raises what `compile` and `adopt`
        raise; the pipe then continues under its old plan.
        """
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
            raise UsageError(f"steps is {steps!r}", fix="pass how many training steps remain")
        sizes = state_bytes_of(given_as("optimizer", optimizer), driven_names(self.session, self._placeholder))
        slowness = self._speeds.judge()
        machines = slowed(self._cluster, slowness)
        found = replan(self.session, machines, steps, sizes, self._preparing(optimizer), cache)
        if found.adopted:
            self._speeds.follow(self.session.plan, machines, slowness)
        return found

    @property
    def stragglers(self) -> Mapping[int, float]:
        """The ranks that take at least twice as long for their computes as planned, or 1.5 times as long as in their
        first steps under the plan, beside the other ranks, by the median of eight steps; and how many times as long,
        by that of the newest five.  Also those that have become so much faster since the last `replan`, which judges
        them all.  Alike on all ranks, and a warning names them.  Measured in `step` on CPUs."""
        return self._speeds.stragglers()

    def _preparing(self, optimizer: GivenOptimizer) -> Preparing:
        if not (optimizers := given_as("optimizer", optimizer)):
            return lambda: lambda _: None
        return partial(carrying, self.session, optimizers, self._placeholder)

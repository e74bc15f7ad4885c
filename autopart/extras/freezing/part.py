"""The part of a pipe that goes on under another plan."""

from __future__ import annotations

import os
from functools import partial

from autopart.extras.freezing.carried import carrying
from autopart.extras.freezing.kept.activations import AutoCache
from autopart.extras.freezing.replan import Replanned, replan
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan
from autopart.session.session import Preparing
from autopart.state.core import Part
from autopart.state.optimizers import GivenOptimizer, given_as


class Replanning(Part):
    """Changes of the plan between two steps."""

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
        self.core.session.adopt(plan, self._preparing(optimizer))

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
        if not isinstance(cache, AutoCache | None):
            raise UsageError(f"the cache is a {type(cache).__name__}", fix="pass autopart.freeze.AutoCache(8 << 30)")
        found = replan(self.core, steps, given_as("optimizer", optimizer), self._preparing(optimizer), cache)
        if found.adopted:
            for part in self.core.parts.values():
                part.replanned()
        return found

    def _preparing(self, optimizer: GivenOptimizer) -> Preparing:
        return partial(carrying, self.core, given_as("optimizer", optimizer))

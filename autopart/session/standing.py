"""What a rank has under the plan that runs, in one value that every change of the plan replaces whole."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.capture import Captured
from autopart.ir.plan import Plan
from autopart.ir.program import Program
from autopart.session.executors.context import RankContext
from autopart.session.executors.executor import Executor


@dataclass(frozen=True, slots=True)
class Standing:
    """A plan, and what one rank has for it.

    captured: the program that was planned.  context: what executors share.  executor: of the batches that the plan is
    for.  preparing_s, moving_s: seconds that capturing and making the stages, and moving tensors, took.
    """

    plan: Plan
    captured: Captured
    context: RankContext
    executor: Executor
    preparing_s: float
    moving_s: float

    @property
    def needing(self) -> tuple[int, ...]:
        """The ranks that need the batch of a training step, in the order of its shards; other calls need the first."""
        return self.plan.stages[0].ranks

    @property
    def divides_parameters(self) -> bool:
        """Whether some rank does not keep the gradient of every parameter."""
        return any(len(ranks) < self.context.world.size for ranks in self.context.placement.keepers.values())

    def keeps(self, name: str) -> bool:
        """Return whether an optimizer of this rank updates what it holds under this name.  With zero=1 another replica
        may, and the value here is the one of the last run."""
        return self.context.placement.keeps(self.context.world.rank, name)

    def program(self) -> Program:
        """Return what every rank does in one training step."""
        return self.executor.program(len(self.plan.micro_rows))

"""The part of a pipe that counts the samples of its steps, and makes samplers that go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from autopart.extras.sampler.sampler import DataPosition, PositionedSampler, sampler_of
from autopart.session.session import Session
from autopart.state.core import Core, Part


class DataOrder(Part):
    """The position in the data, which checkpoints keep, and samplers that follow it."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.position = DataPosition()
        core.companions["data"] = self.position

    def sampler(
        self, dataset: Any, rows: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> PositionedSampler:
        """Return a batch sampler for `DataLoader(dataset, batch_sampler=...)`, alike on every rank.

        The order of samples depends only on (seed, epoch).  `save` saves the position, counted in the samples of steps,
        and after `load` the iteration continues there: each sample comes once in an epoch, even if the plan, the ranks
        or `rows` change.  During an iteration every `step` counts as one batch.  Raises UsageError for a dataset
        without a length, and if dataset size, seed or shuffle differ from those of the position.
        """
        return sampler_of(self.position, dataset, rows, seed, shuffle=shuffle, drop_last=drop_last)

    def around_step(self, session: Session, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Count the samples of a batch."""
        return self.position.counting(*batch)

    def batch_taken(self) -> None:
        """Note that a batch was taken ahead."""
        self.position.take()

    def batch_given(self) -> None:
        """Count the batch that was taken first."""
        self.position.advance()

    def batches_dropped(self) -> None:
        """Forget what was taken ahead."""
        self.position.drop()

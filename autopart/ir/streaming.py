"""The rhythm of asynchronous training: a pipeline that is never emptied between batches.

Micro-batches are counted over all batches.  In tick i every stage s runs the forward of micro-batch i, then the
backward of micro-batch i - lags[s]; what does not exist (before the first, behind the last) is left out.  So one tick
describes the warm-up, the steady state and the drain of any number of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True, slots=True)
class Streaming:
    """What each stage does in a tick, and the weights that it uses.

    micros: micro-batches of a batch.  lags: for each stage, the ticks between the forward and the backward of a
    micro-batch.  updates: for each stage, the number of micro-batches whose gradients make an update, a multiple of
    `micros`.  periods: for each stage, the replicas that take micro-batches in turn, 1 if none do.  delayed: whether
    every stage uses the weights of exactly one update earlier (PipeDream-2BW), in place of its newest (PipeDream).
    """

    micros: int
    lags: tuple[int, ...]
    updates: tuple[int, ...]
    periods: tuple[int, ...]
    delayed: bool = False

    @property
    def ring(self) -> int:
        """Number of slots of a stage: micro-batches a ring apart have the same slot, and are never alive together.

        It holds twice what is in flight, so that messages of the last user of a slot have long arrived.
        """
        unit = lcm(self.micros, *self.updates, *self.periods)
        return -(-2 * (self.micros + max(self.lags)) // unit) * unit

    def version(self, stage: int, batch: int) -> int:
        """Return the number of updates in the weights that a batch uses on a stage, forward and backward.

        These are all that the stage has made before the batch's first forward (weight stashing; PipeDream, SOSP 2019,
        section 3.3), or all but the last one (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
        ICML 2021, section 3.1).
        """
        if self.delayed:
            return max(0, batch - 1)
        return max(0, (batch * self.micros - self.lags[stage]) // self.updates[stage])

    def versions(self, stage: int) -> int:
        """Return the most versions of its weights that a stage holds at once, the newest included."""
        return 2 if self.delayed else 1 - (-self.lags[stage] // self.updates[stage])

    def staleness(self, stage: int) -> int:
        """Return how many updates the stage makes, at most, between a batch's forward and the update that it is in."""
        return self.versions(stage) - 1

    def last_tick(self, micros: int) -> int:
        """Return the tick after which nothing is in flight, when `micros` micro-batches have entered."""
        whole = [(micros - 1) // every * every + every for every in self.updates]
        return max(end - 1 + lag for end, lag in zip(whole, self.lags, strict=True))

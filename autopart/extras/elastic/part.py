"""The part of a pipe that finds slow devices in its steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.extras.elastic.speeds import Speeds, slowed
from autopart.ir.cluster import Cluster
from autopart.session.session import Session
from autopart.state.core import Core, Part


class Devices(Part):
    """How fast the devices of a pipe are, beside what its plan says."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.speeds = Speeds()

    def stragglers(self) -> Mapping[int, float]:
        """The ranks that take at least twice as long for their computes as planned, or 1.5 times as long as in their
        first steps under the plan, beside the other ranks, by the median of eight steps; and how many times as long,
        by that of the newest five.  Also those that have become so much faster since the last `replan`, which judges
        them all.  Alike on all ranks, and a warning names them.  Measured in `step` on CPUs."""
        return self.speeds.stragglers()

    def brought_up(self, session: Session) -> None:
        """Begin with the first plan."""
        self.speeds.follow(session.plan, self.core.cluster)

    def now(self, cluster: Cluster) -> Cluster:
        """Judge the devices, and return the cluster with those that are slow."""
        return slowed(cluster, self.speeds.judge())

    def adopted(self, call: str) -> None:
        """Begin again; a plan that was made here takes devices for as slow as they were judged."""
        known = self.speeds.judged if call == "replan" else ()
        machines = slowed(self.core.cluster, known) if known else self.core.cluster
        self.speeds.follow(self.core.session.plan, machines, known)

    def step_ended(self, loss: torch.Tensor) -> None:
        """Note what each rank computed for."""
        self.speeds.note(self.core.session.computed_ns)

"""The part of a pipe that finds slow devices in its steps."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.extras.elastic.speeds import Speeds, slowed
from autopart.ir.cluster import Cluster
from autopart.session.ranks.listener import Listener
from autopart.state.core import Core, Part


class Devices(Part):
    """How fast the devices of a pipe are, beside what its plan says."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.speeds = Speeds(core.cluster)
        self._slowness: Sequence[float] = ()

    @property
    def listeners(self) -> Sequence[Listener]:
        """The speeds follow plans and steps."""
        return (self.speeds,)

    def now(self, cluster: Cluster) -> Cluster:
        """Judge the devices, and return the cluster with those that are slow."""
        self._slowness = self.speeds.judge()
        return slowed(cluster, self._slowness)

    def replanned(self) -> None:
        """Begin again with a plan that takes devices for as slow as they were judged."""
        self.speeds.follow(self.core.session.plan, slowed(self.core.cluster, self._slowness), self._slowness)

"""What the executors of one rank share under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.capture import CaptureCache
from autopart.options import Options
from autopart.runtime.group.world import World
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.tensors import LocalTensors
from autopart.session.placement import Placement


@dataclass(frozen=True, slots=True)
class RankContext:
    """The state that executors of one rank share under a plan.  values: parameters whose optimizer state is shared."""

    world: World
    captures: CaptureCache
    tensors: LocalTensors
    placement: Placement
    values: SharedValues
    options: Options

"""What all that runs on one rank shares: what it holds and where it stands; and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from autopart.capture import CaptureCache
from autopart.capture.guards import check_autocast
from autopart.runtime.activity import set_activity
from autopart.runtime.group.world import World
from autopart.runtime.sums.shared_values import SharedValues
from autopart.runtime.tensors import LocalTensors
from autopart.session.placement import Placement
from autopart.session.ranks.health import Health


class Mode(Enum):
    """What is run; the value is the mode of `capture`."""

    TRAIN = "step"
    LOSS = "loss"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True)
class Guard:
    """What is done about gradients that are not finite.  looks: whether they are looked for; scale: of the loss."""

    looks: bool = False
    scale: float = 1.0


UNGUARDED = Guard()


@dataclass(frozen=True, slots=True)
class RankContext:
    """What all executors of one rank share.  placement: of the plan.  values: of parameters, where replicas share the
    optimizer's state."""

    world: World
    captures: CaptureCache
    tensors: LocalTensors
    placement: Placement
    values: SharedValues
    health: Health
    loss_reduction: str = "auto"
    sync_batchnorm: bool = False

    def keeps(self, name: str) -> bool:
        """Whether an optimizer of this rank drives what it holds under this name: where replicas share the optimizer's
        state, another of them may, and then the value here is that of the last run."""
        return self.placement.keeps(self.world.rank, name)

    def follow_model(self, *, training: bool) -> None:
        """Compare the model with its captures, and bring its new values and flags to what this rank holds.  training:
        whether training flags count.  Raises RefusedError for changes that no run can follow."""
        check_autocast(self.world.device.type)
        set_activity("comparing the model with its capture")
        self.tensors.check()
        if toggled := self.tensors.masters.toggled():
            for name, parameter in self.captures.trained.named_parameters():
                parameter.requires_grad_(toggled.get(name, parameter.requires_grad))
        if self.captures.refresh(training=training):
            self.tensors.follow_flags(self.captures.trained.named_parameters())
        self.tensors.masters.write()

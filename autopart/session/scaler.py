"""The scale of the loss in fp16: what keeps small gradients above zero and large ones below infinity.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the rules are those of torch.amp.GradScaler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from autopart.ir.errors import UsageError

_TRACKER = "_growth_tracker"


@dataclass
class LossScaler:
    """Equal on all ranks, for every rank sees the same overflows.

    scale: what the loss is multiplied by before the backward, and gradients are divided by after it.  After a step with
    an overflow it is multiplied by `backoff_factor`, after `growth_interval` steps in a row without one by
    `growth_factor`.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0

    def update(self, *, finite: bool) -> None:
        """After a step: whether all gradients were finite."""
        if not finite:
            self.scale *= self.backoff_factor
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.growth_interval:
            self.scale *= self.growth_factor
            self.growth_tracker = 0

    def get_scale(self) -> float:
        """`scale`, as torch's scaler tells it."""
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """As of torch.amp.GradScaler, which takes it too."""
        state = asdict(self)
        state[_TRACKER] = state.pop("growth_tracker")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, also of a torch.amp.GradScaler.  Raises UsageError for one that is none."""
        known = {field.name if field.name != "growth_tracker" else _TRACKER: field.name for field in fields(self)}
        good = set(state) == set(known) and all(isinstance(value, (int, float)) for value in state.values())
        if not good or state["scale"] <= 0:
            raise UsageError(
                "this is no state of a loss scaler",
                why=f"it holds {', '.join(sorted(map(str, state))) or 'nothing'}",
                fix="pass what pipe.scaler.state_dict() or torch.amp.GradScaler.state_dict() returned",
            )
        for name, value in state.items():
            setattr(self, known[name], value)

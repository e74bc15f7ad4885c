"""The scale of the loss in fp16, which keeps small gradients above zero and large ones below infinity, and the steps
that are skipped because a gradient is not finite.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the rules are those of torch.amp.GradScaler.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from autopart.ir.errors import NonFiniteError, UsageError

_TRACKER = "_growth_tracker"
WARN_AFTER = 10
"""Skipped steps in a row."""


class NonFiniteWarning(UserWarning):
    """Many training steps in a row were skipped, because gradients are infinite or NaN."""


@dataclass
class Skipped:
    """Whether the last step was skipped, and how many were in a row."""

    last: bool = False
    in_a_row: int = 0

    def note(self, overflow: str) -> bool:
        """Count a step; whether it is time to warn.  overflow: the first gradient that is not finite, or ""."""
        self.last = bool(overflow)
        self.in_a_row = self.in_a_row + 1 if overflow else 0
        return self.in_a_row == WARN_AFTER

    def warn(self, overflow: str) -> None:
        """Warn on the line of the script that called `step`."""
        warnings.warn(
            f"{self.in_a_row} training steps in a row were skipped: the gradient of {overflow} is infinite or NaN.  A "
            "smaller scale of the loss does not help where a weight or the batch itself is NaN; "
            'non_finite="raise" stops at the first such step',
            NonFiniteWarning,
            stacklevel=5,
        )


def not_finite(overflow: str, scale: float) -> NonFiniteError:
    """The error for a step with a gradient that is not finite.  scale: of the loss."""
    return NonFiniteError(
        f"the gradient of {overflow} is infinite or NaN",
        why=f"the loss was scaled by {scale:g}" if scale != 1.0 else "the step diverged, or divided by zero",
        fix='go on with the next batch (gradients and buffers are as before the step), or pass non_finite="skip"',
    )


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

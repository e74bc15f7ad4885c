"""The loss scale in fp16, and the steps that are skipped because a gradient is not finite.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the rules are those of torch.amp.GradScaler.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from autopart.ir.errors import NonFiniteError, UsageError

WARN_AFTER = 10
"""Skipped steps in a row before a warning."""


class NonFiniteWarning(UserWarning):
    """A loss is infinite or NaN, or many training steps in a row were skipped because gradients are."""


def warn_loss(loss: float, step: int) -> None:
    """Warn on the line of the script that called `step`, whose loss is not finite.  step: its number, from 1."""
    warnings.warn(
        f"the loss of step {step} is {loss}, and its gradients are kept; this is said once.  "
        'non_finite="raise" in compile stops at such a step and names a parameter, "skip" leaves it out',
        NonFiniteWarning,
        stacklevel=4,
    )


def warn_skipped(overflow: str) -> None:
    """Warn on the line of the script that called `step`.  overflow: the first gradient that is not finite."""
    warnings.warn(
        f"{WARN_AFTER} training steps in a row were skipped: the gradient of {overflow} is infinite or NaN.  A smaller "
        "scale of the loss does not help where a weight or the batch itself is NaN; "
        'non_finite="raise" stops at the first such step',
        NonFiniteWarning,
        stacklevel=4,
    )


def not_finite(overflow: str, scale: float) -> NonFiniteError:
    """Return the error for a step with a gradient that is not finite.  scale: of the loss."""
    return NonFiniteError(
        f"the gradient of {overflow} is infinite or NaN",
        why=f"the loss was scaled by {scale:g}" if scale != 1.0 else "the step diverged, or divided by zero",
        fix='go on with the next batch (gradients and buffers are as before the step), or pass non_finite="skip"',
    )


def refuse_ambiguous(name: str, value: object, model: nn.Module, *, by_keywords: bool) -> None:
    """Raise UsageError for an argument of `step` that comes with a batch of keywords, if the model has one of this
    name too."""
    if value is not None and by_keywords and name in inspect.signature(model.forward).parameters:
        raise UsageError(
            f"{name}= may mean the model's own argument, or that of pipe.step",
            why="both have this name",
            fix=f"pass the batch as one mapping: pipe.step({{...}}) gives {name} to the model, pipe.step({{...}}, "
            f"{name}=...) is that of the step",
        )


def checked_scale(scale: float | None, model: nn.Module, *, by_keywords: bool) -> float:
    """Return what a step multiplies its loss by, 1 for None.  by_keywords: whether the batch is given as keyword
    arguments, of which the model may have one named scale.  Raises UsageError."""
    if scale is None:
        return 1.0
    refuse_ambiguous("scale", scale, model, by_keywords=by_keywords)
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise UsageError(f"scale is {scale!r}", fix="use a number above 0, such as scale=1 / 4 in each of 4 steps")
    return float(scale)


@dataclass
class LossScaler:
    """The dynamic loss scale, equal on all ranks, since all see the same overflows.

    scale: factor of the loss in the backward; gradients are divided by it afterwards.  A step with an overflow
    multiplies it by `backoff_factor`, and `growth_interval` steps in a row without one by `growth_factor`.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    _growth_tracker: int = 0

    def update(self, *, finite: bool) -> None:
        """Adapt the scale after a step.  finite: whether all gradients were finite."""
        if not finite:
            self.scale *= self.backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self.scale *= self.growth_factor
            self._growth_tracker = 0

    def get_scale(self) -> float:
        """Return `scale`, as torch.amp.GradScaler does."""
        return self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which torch.amp.GradScaler can load too."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class or of torch.amp.GradScaler.  Raises UsageError for anything else."""
        good = set(state) == set(asdict(self)) and all(isinstance(value, (int, float)) for value in state.values())
        if not good or state["scale"] <= 0:
            raise UsageError(
                "this is not a state of a loss scaler",
                why=f"it holds {', '.join(sorted(map(str, state))) or 'nothing'}",
                fix="pass what pipe.scaler.state_dict() or torch.amp.GradScaler.state_dict() returned",
            )
        for name, value in state.items():
            setattr(self, name, value)

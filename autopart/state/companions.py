"""What is saved and loaded together with a pipe: positions in data, averages of weights, what a user adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from autopart.ir.errors import CheckpointError


class Companion(Protocol):
    """State that a checkpoint keeps besides the model and the optimizer; registered in `Core.companions`.

    After a load under another plan a rank may keep other parameters than before, so tensors go by the name of the
    parameter or buffer that they belong to, and each rank gets those of the ones that it keeps.
    """

    def state(self) -> dict[str, Any]:
        """Return numbers, texts and lists of them, equal on every rank, as JSON can hold them."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of this rank by the original name of a parameter or buffer that this rank keeps; shapes
        may differ from the parameter's.  A copy is made while saving; the mapping may hold the live tensors."""

    def check(self, state: Any) -> None:
        """Raise CheckpointError, which names the value, for a state that `state` never returns.  Called on every rank
        before anything is loaded; nothing may change."""

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` and `tensors` returned when the checkpoint was written.  tensors: of the names that
        this rank keeps now.  Everything has been checked and read before any companion is loaded."""


def require_integer(value: Any, name: str, least: int = 0, most: int | None = None) -> None:
    """Raise CheckpointError for a value of a checkpoint that is not an integer within limits.  name: for the error."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise refusal(name, value, f"it has to be an integer {limits}")


def refusal(name: str, value: Any, why: str) -> CheckpointError:
    """Return the error for a value of a checkpoint that was not written like that."""
    return CheckpointError(f"{name} is {value!r:.80} in the checkpoint", why=why, fix="use another checkpoint")

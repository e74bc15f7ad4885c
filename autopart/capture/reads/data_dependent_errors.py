"""What is said where a model's Python asks about numbers that no capture can know."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autopart.ir.errors import CaptureError


@dataclass(frozen=True)
class Unanswered:
    """A question whose answer does not depend on the inputs alone.  op: what asked; where: the user's place; source:
    what else it depends on; flag: whether a yes or no was asked for, and not a number."""

    op: str
    where: str
    source: str
    flag: bool

    def refusal(self, model: nn.Module) -> CaptureError:
        """For the user."""
        if self.flag:
            return CaptureError(
                "the model's Python control flow depends on the data of a tensor",
                where=self.where,
                why=f"which way it goes depends on {self.source}, which every step changes",
                fix=flow_fix(model, random=self.source.startswith("random numbers")),
            )
        return CaptureError(
            f"forward() reads a number out of a tensor ({self.op.removeprefix('aten.').split('.')[0]})",
            where=self.where,
            why=f"it depends on {self.source}, so it would stay as it was while the model was captured",
            fix="keep it a tensor: no .item(), .tolist(), int() or float(); what is only logged can be returned as an "
            "output, or taken from the result of step()",
        )


def is_data_dependent(error: Exception) -> bool:
    """Whether torch.export stopped because a size, or a way, depends on the numbers in a tensor."""
    name = type(error).__name__
    return "data-dependent" in str(error) or "DataDependent" in name or "DynamicOutputShape" in name


def flow_fix(model: nn.Module, *, random: bool) -> str:
    """What can be done where an `if` of forward() depends on tensors.  random: on numbers that forward() draws."""
    if random:
        return "use torch.where instead of `if`; for layer drop set its probability to 0"
    return "use torch.where instead of `if`" + _experts_fix(model)


SIZE_FIX = (
    "use operations with fixed shapes: torch.where, or a product with the mask, instead of boolean indexing or "
    "nonzero; a loop over experts: each on all tokens, times its routing weight"
)


def size_fix(model: nn.Module) -> str:
    """What can be done where sizes depend on the numbers in a tensor."""
    return SIZE_FIX + _experts_fix(model)


def _experts_fix(model: nn.Module) -> str:
    """For a model whose implementation of experts can be chosen, as transformers lets some models do."""
    supports = getattr(model, "_can_set_experts_implementation", None)
    chosen = callable(getattr(model, "set_experts_implementation", None)) and (not callable(supports) or supports())
    return '; here: call model.set_experts_implementation("grouped_mm")' if chosen else ""

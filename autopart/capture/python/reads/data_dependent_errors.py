"""Errors for a model's Python that asks about numbers which no capture can know."""

from __future__ import annotations

from torch import nn

from autopart.ir.errors import CaptureError

SIZE_FIX = (
    "use operations with fixed shapes: torch.where, or a product with the mask, instead of boolean indexing or "
    "nonzero; a loop over experts: each on all tokens, times its routing weight"
)


def unanswered(model: nn.Module, op: str, where: str, source: str, *, flag: bool) -> CaptureError:
    """Return the error for a question whose answer does not depend on the inputs alone.

    op: what asked; where: the user's line; source: what else it depends on; flag: whether it is a yes or no question.
    """
    if flag:
        random = source.startswith("random numbers")
        layer_drop = "; for layer drop set its probability to 0" if random else _experts_fix(model)
        return CaptureError(
            "the model's Python control flow depends on the data of a tensor",
            where=where,
            why=f"the branch depends on {source}, which every step changes",
            fix="use torch.where instead of `if`" + layer_drop,
        )
    return CaptureError(
        f"forward() reads a number out of a tensor ({op.removeprefix('aten.').split('.')[0]})",
        where=where,
        why=f"it depends on {source}; the captured program would keep the value that it had during the capture",
        fix="keep it a tensor: no .item(), .tolist(), int() or float(); what is only logged can be returned as an "
        "output, or taken from the result of step()",
    )


def is_data_dependent(error: Exception) -> bool:
    """Return whether torch.export stopped because a size or a branch depends on the numbers in a tensor."""
    name = type(error).__name__
    return "data-dependent" in str(error) or "DataDependent" in name or "DynamicOutputShape" in name


def size_fix(model: nn.Module) -> str:
    """Return what the user can do where sizes depend on the numbers in a tensor."""
    return SIZE_FIX + _experts_fix(model)


def _experts_fix(model: nn.Module) -> str:
    """Return the advice for a model whose implementation of experts can be chosen, as in transformers."""
    supports = getattr(model, "_can_set_experts_implementation", None)
    chosen = callable(getattr(model, "set_experts_implementation", None)) and (not callable(supports) or supports())
    return '; here: call model.set_experts_implementation("grouped_mm")' if chosen else ""

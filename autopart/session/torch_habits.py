"""What scripts for plain torch do with a loss and an optimizer, and what a pipeline makes of it.

A step has done the backward already, so its loss refuses one.  An optimizer that needs a closure looks at all
parameters at once, of which a rank holds a part: it is refused when it steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart.costs.optimizer_state import needs_closure
from autopart.ir.errors import UsageError
from autopart.session.session import Session


class Loss(torch.Tensor):
    """A loss that a pipeline returned, and what is computed of it: a tensor without a backward."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(
            "backward() is called on a loss that a pipeline returned",
            why="pipe.step(batch) runs forward and backward of all micro-batches and has added the gradients to .grad; "
            "eval_loss computes none",
            fix="leave backward() out: optimizer.zero_grad(); loss = pipe.step(batch); optimizer.step().  To weigh the "
            "loss, do so in the model or in loss_fn",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)  # a file needs nothing of ours to be read


def without_backward(loss: torch.Tensor) -> torch.Tensor:
    """The same tensor, which says what to do instead of backward()."""
    return loss.as_subclass(Loss)


def watch_optimizers(session: Session) -> Callable[[], None]:
    """From now on a step of an optimizer that cannot train what it was made for raises UsageError: one that needs a
    closure, over several ranks, and one that drives parameters of the model in the place of their masters.

    Returns what ends it.  Other optimizers take the time of looking for theirs.
    """
    known: dict[type, bool] = {}

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kind = type(optimizer)
        if kind not in known:
            known[kind] = session.world.size > 1 and needs_closure(kind)
        rounded = session.tensors.masters.rounded
        if not known[kind] and not rounded:
            return
        driven = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        mastered = next((rounded[one] for one in driven if one in rounded), None)
        if mastered is not None:
            raise UsageError(
                f"an optimizer drives {mastered} of the model, which has a master",
                why="with master_weights=True gradients go to masters in fp32, and the model gets their values rounded",
                fix="make the optimizer from pipe.parameters(), or pipe.named_parameters(), after the pipe is planned",
            )
        if known[kind] and {id(tensor) for tensor in session.tensors.driven.values()}.intersection(driven):
            raise UsageError(
                f"{kind.__name__} cannot drive the parameters of a pipeline over several ranks",
                why="it looks at all parameters at once, and each rank holds its own part of them",
                fix="use an optimizer that takes each parameter by itself, such as torch.optim.AdamW",
            )

    handle = register_optimizer_step_pre_hook(before_step)
    return handle.remove

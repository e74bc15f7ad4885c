"""fp32 master weights of parameters in half precision: the optimizer updates these, the model holds them rounded.

A bf16 weight has 8 significant bits, so an update below a 512th of it is lost to rounding.  With a master weight
updates add up in fp32, and before every run the model's parameter becomes the rounded master.  The gradient of a step
goes to the master as it was summed, in fp32 (`sums.reduce.GradientsAside`).

The next run would overwrite what a script writes into the model's parameter, so such a write is found by torch's
version counter and refused.  A write through `.data` is not counted, and is overwritten.

Micikevicius et al., "Mixed Precision Training" (2018), section 3.1.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

from autopart.ir.errors import RefusedError, UsageError

HALF = (torch.float16, torch.bfloat16)
CAN_WIDEN = hasattr(torch.Tensor, "grad_dtype")  # from torch 2.12 on; before, sums are of the parameter's own type
_MINE = "with master_weights=True the optimizer drives masters in fp32, which pipe.parameters() yields"


class Masters:
    """The master weights of this rank.

    by_name: the masters.  rounded: names of the model's parameters, by their identity."""

    def __init__(self) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self.rounded: dict[int, str] = {}
        self._rounded: dict[str, nn.Parameter] = {}
        self._versions: dict[str, int] = {}
        self._trained: dict[str, bool] = {}

    def hold(self, name: str, parameter: nn.Parameter, earlier: Masters | None = None) -> None:
        """Make a master of a parameter, or take over the earlier one; it takes the parameter's gradient."""
        if not CAN_WIDEN:
            raise UsageError(
                "master_weights=True needs torch 2.12 or newer",
                why=f"in torch {torch.__version__} the gradients of {name} are summed in {parameter.dtype}",
                fix="update torch, or leave master_weights out",
            )
        master = earlier.by_name.get(name) if earlier is not None else None
        if master is None:
            master = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        self.by_name[name], self._rounded[name], self.rounded[id(parameter)] = master, parameter, name
        self._versions[name], self._trained[name] = parameter._version, parameter.requires_grad

    def write(self) -> None:
        """Write the rounded masters into the model's parameters.  O(parameters)."""
        if self.by_name:
            with torch.no_grad():
                torch._foreach_copy_(list(self._rounded.values()), list(self.by_name.values()))
            self.accept()

    def accept(self) -> None:
        """Take the present values of the model's parameters as known."""
        self._versions = {name: parameter._version for name, parameter in self._rounded.items()}

    def written(self) -> str | None:
        """Return the first parameter of the model that was written to since `write` or `accept`."""
        return next((n for n, parameter in self._rounded.items() if parameter._version != self._versions[n]), None)

    def check(self) -> None:
        """Raise RefusedError if a script wrote to a parameter of the model or gave it a gradient, since both would be
        lost."""
        name = self.written()
        if name is not None:
            raise RefusedError(
                f"{name} was written to in the model since the last run",
                why=f"{_MINE}, and at every run the model's value becomes the master's, rounded",
                fix="call pipe.sync_model(), which brings back the trained values, and write to the parameter that "
                "pipe.named_parameters() yields under this name; or pipe.load_state_dict(model.state_dict()), which "
                "takes over all of the model's values",
            )
        name = next((name for name, parameter in self._rounded.items() if parameter.grad is not None), None)
        if name is not None:
            raise RefusedError(
                f"{name} has a gradient in the model",
                why=f"{_MINE}, and gradients go to the masters",
                fix="add it to the gradient of the parameter that pipe.named_parameters() yields under this name, and "
                "set the model's to None",
            )

    def toggled(self) -> dict[str, bool]:
        """Return the new requires_grad of each master whose flag the user changed, after copying it to the model's
        parameter."""
        found = {n: p.requires_grad for n, p in self.by_name.items() if p.requires_grad != self._trained[n]}
        for name, trained in found.items():
            self._rounded[name].requires_grad_(trained)
        self._trained.update(found)
        return found

    def follow(self) -> None:
        """Copy requires_grad from the model's parameters to the masters."""
        for name, parameter in self._rounded.items():
            self.by_name[name].requires_grad_(parameter.requires_grad)
            self._trained[name] = parameter.requires_grad

    def take_over(self, name: str, value: torch.Tensor, master: torch.Tensor | None = None) -> None:
        """Load a value from a state dict, and the master saved with it if it still rounds to that value."""
        own = self.by_name.get(name)
        if own is None:
            return
        exact = master is not None and master.shape == value.shape and torch.equal(master.to(value), value)
        with torch.no_grad():
            own.copy_(master if exact and master is not None else value)


def needs_master(tensor: torch.Tensor) -> TypeGuard[nn.Parameter]:
    """Whether this is a trained parameter in half precision."""
    return isinstance(tensor, nn.Parameter) and tensor.dtype in HALF and tensor.requires_grad


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: in a step fp32 for half precision (`sums.reduce.GradientsAside`)."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return found or parameter.dtype

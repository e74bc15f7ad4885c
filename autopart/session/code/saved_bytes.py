"""What each call of a program keeps for its backward, measured: the tensors that autograd is told to save.

Each storage counts once, for the first call that saves it, as in the table of ops; what the program is given
(parameters, inputs) does not count.  Tensors that a custom autograd function hides from autograd are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopart.capture.trace.grouped_products import kernel_of


def saved_by_call(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the bytes that each call of a program keeps, by name of its node.  Runs its forward once."""
    run = _SavingRun(module, inputs)
    run.run(*inputs)
    return run.saved


class _SavingRun(fx.Interpreter):
    """Runs a module op by op.  saved: bytes that each op keeps and no op before it."""

    def __init__(self, module: fx.GraphModule, given: Sequence[torch.Tensor]) -> None:
        super().__init__(module)
        self.saved: dict[str, int] = {}
        self._known = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in given}
        self._node = ""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; storages stay alive meanwhile, so that no address is used twice."""
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self._node = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op with the kernel that the runtime uses."""
        return kernel_of(target)(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known[storage.data_ptr()] = storage
            self.saved[self._node] = self.saved.get(self._node, 0) + storage.nbytes()
        return tensor.detach()  # a result that its own op saves would keep that op alive

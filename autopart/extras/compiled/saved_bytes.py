"""What each call of a program keeps for its backward, measured: the tensors that autograd saves.

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
    saved = _Saved(inputs)
    with torch.autograd.graph.saved_tensors_hooks(saved.note, lambda tensor: tensor):
        _NotedRun(module, saved).run(*inputs)
    saved.known.clear()
    return saved.bytes_of


class _Saved:
    """What is saved.  bytes_of: by name of a node, what it keeps and no node before it.  node: the one that runs.

    Autograd keeps this object as long as its graph, so it must not hold a result: nobody would free either.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        self.node = ""
        self.bytes_of: dict[str, int] = {}
        # Storages stay alive meanwhile, so that no address is used twice.
        self.known = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in given}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the storage of a tensor that is saved, and return what is kept."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.known[storage.data_ptr()] = storage
            self.bytes_of[self.node] = self.bytes_of.get(self.node, 0) + storage.nbytes()
        return tensor.detach()  # a result that its own op saves would keep that op alive


class _NotedRun(fx.Interpreter):
    """Runs a module op by op, and says which one runs."""

    def __init__(self, module: fx.GraphModule, saved: _Saved) -> None:
        super().__init__(module)
        self._saved = saved

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self._saved.node = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op with the kernel that the runtime uses."""
        return kernel_of(target)(*args, **kwargs)

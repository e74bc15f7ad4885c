"""Lightning Fabric on a pipeline: a strategy, through the interface that Fabric has for those of others.

    fabric = Fabric(accelerator="cpu", strategy=PipelineStrategy(sample=batch, stages=2))
    model, optimizer = fabric.setup(model, optimizer)
    fabric.backward(model(**batch).loss)

Forward and backward of a pipeline cannot be taken apart, so `model(batch)` runs both and keeps the gradients of this
step, and `fabric.backward` adds them, times what the loss was multiplied with, as autograd would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopart.api import compile as compile_pipe
from autopart.integrations.fabric_parts import PipelineModel, refused, replace_parameters, sorted_state
from autopart.pipe.pipe import Pipe

_HOME = "lightning.fabric" if "lightning_fabric" not in sys.modules and find_spec("lightning") else "lightning_fabric"
_Strategy: Any = import_module(f"{_HOME}.strategies").Strategy


class PipelineStrategy(_Strategy):  # type: ignore[misc]
    """Runs the model that `fabric.setup` is given as a pipeline over all processes, which torchrun starts.

    sample, cluster, options: as for `autopart.compile`.  The model's forward takes what `pipe.step` takes and returns
    the loss; with `loss_fn=` it is called with (inputs, target).  The optimizer is given the parameters of this rank.
    Every rank reads whole batches.  `teardown` brings all trained values to the model.
    """

    pipe: Pipe | None = None

    def __init__(self, sample: Any, cluster: Any = None, **options: Any) -> None:
        super().__init__()
        self._sample, self._cluster, self._options = sample, cluster, options
        self._names: dict[int, str] = {}

    root_device = torch.device("cpu")
    """Of batches and of the model's own values: a rank moves what it needs."""
    global_rank = property(lambda self: int(os.environ.get("RANK", "0")))
    local_rank = property(lambda self: int(os.environ.get("LOCAL_RANK", "0")))
    node_rank = property(lambda self: int(os.environ.get("GROUP_RANK", "0")))
    world_size = property(lambda self: int(os.environ.get("WORLD_SIZE", "1")))
    is_global_zero = property(lambda self: self.global_rank == 0)

    def setup_environment(self) -> None:
        """Do nothing: a pipe joins its ranks where the model is set up."""

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: each rank moves its stages."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Compile the model.  Collective."""
        kind = type(self.precision).__name__
        if kind != "Precision":
            raise refused(f"precision is {kind}", "casts are part of the program", "PipelineStrategy(precision=...)")
        if self.pipe is not None:
            raise refused("a second model is set up", "a pipeline trains one", "set up the other one by itself")
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.pipe = compile_pipe(module, self._cluster, sample=self._sample, **self._options)
        return PipelineModel(self.pipe, module, self._sample)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Give an optimizer this rank's parameters in place of the model's; groups keep their options."""
        replace_parameters(optimizer, self._names, dict(self._open().named_parameters()))
        return optimizer

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of the step whose loss this is."""
        torch.autograd.backward(tensor, *args, **kwargs)

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip by the norm over all stages.  Collective."""
        norm = self._open().clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        return norm

    def save_checkpoint(self, path: Any, state: Mapping[str, Any], storage_options: Any = None, **more: Any) -> None:
        """Save a checkpoint into a folder, each rank its part (`Pipe.save`).  Collective."""
        if storage_options is not None or any(more.values()):
            raise refused("options of a save are given", "each rank writes its part", "fabric.save(folder, state)")
        self._open().save(path, *sorted_state(state))

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> dict[str, Any]:
        """Load a checkpoint into the model, the optimizers and schedulers, and the rest of a state.  Collective."""
        if more.get("strict") is False:
            raise refused("strict is False", "a checkpoint is loaded whole", "fabric.load(folder, state)")
        optimizers, schedulers, rest = sorted_state(state or {})
        found = dict(self._open().load(path, optimizers, schedulers) or {})
        if missing := sorted(rest.keys() - found.keys()):
            raise KeyError(f"The requested state contains a key '{missing[0]}' that does not exist in the checkpoint.")
        for name in rest:
            state[name] = found.pop(name)
        return found

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, one after the other along a new axis.  Collective."""
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(found, tensor.detach().contiguous(), group) if self._joined() else found[0].copy_(tensor)
        return torch.stack(found)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum or the mean over all ranks.  Collective; a loss is that of the whole batch without it."""
        name = str(reduce_op).lower().rpartition(".")[2]
        if name not in ("sum", "mean", "avg"):
            raise refused(
                f"reduce_op is {name}", "sums and means are there", "fabric.all_gather, and reduce its result"
            )
        total = self.all_gather(torch.as_tensor(tensor), group).sum(0)
        return total if name == "sum" else total / self.world_size

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if self._joined():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what a rank has.  Collective."""
        found = [obj]
        if self._joined():
            dist.broadcast_object_list(found, src)
        return found[0]

    def teardown(self) -> None:
        """Close the pipeline, and bring all trained values to the model of every rank.  Collective."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def _open(self) -> Pipe:
        if self.pipe is None:
            raise refused("no model is set up", "", "call fabric.setup(model, optimizer) first")
        return self.pipe

    def _joined(self) -> bool:
        if self.world_size > 1:
            self._open()  # there is no group of ranks before
        return bool(self.world_size > 1)

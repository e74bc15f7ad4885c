"""What the loop of a Trainer on a pipeline is given: the model that it trains, and the batches of a single process."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from autopart.integrations.trainer_limits import refused
from autopart.pipe.pipe import Pipe
from autopart.state.misuse_guards import MissingError

_SHOWN = "train eval training zero_grad parameters named_parameters modules named_modules children named_children"


class PipelineModel:
    """What the loop of the trainer may do with the model that it trains.  Called in eval mode, it predicts."""

    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self.loss_only = False

    def __call__(self, **inputs: Any) -> Any:
        """Return what the model returns for a batch in eval mode, or its loss alone.  Collective."""
        if self._pipe.training:
            raise refused(
                "the model is called in a training step",
                "forward and backward of all micro-batches run together",
                "call super().training_step(model, inputs, num_items_in_batch)",
            )
        if self.loss_only:
            return {"loss": self._pipe.eval_loss(inputs).detach()}
        return tree_map_only(torch.Tensor, lambda value: value.to(self._device), self._pipe.predict(inputs))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the sums of replicas add up over the steps of an accumulation."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name in _SHOWN.split():
            return getattr(self._pipe, name)
        if name == "config":
            return self._pipe.model.config
        raise MissingError(
            f"the model that a pipeline trains has no {name!r}",
            fix="use trainer.pipe, or trainer.model after sync_model",
        )


def undivided(loader: Any) -> Any:
    """Return the loader, with its batches no longer divided among the ranks: all read those of a single process."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        what = "a streamed dataset" if isinstance(dataset, IterableDataset) else f"batches of a {type(loader).__name__}"
        raise refused(
            what, "ranks could read different batches", "pass a dataset with a length, or a DataLoader of one"
        )
    base = getattr(loader, "base_dataloader", loader)
    for name in ("batch_sampler", "sampler"):
        divided = getattr(base, name)
        if hasattr(divided, "num_processes") and hasattr(divided, "batch_sampler"):
            object.__setattr__(base, name, divided.batch_sampler)  # a loader of torch lets nobody set it
    return loader


def first_batch(loader: Any, prepare: Callable[[Any], Any]) -> Any:
    """Return the first batch, prepared; nothing that is drawn from for it has moved afterwards.

    It is read in this process: workers would start for it, and go on from it.
    """
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(one): one for holder in holders if (one := getattr(holder, "generator", None)) is not None}
    states = [(one, one.get_state()) for one in found.values()]
    own, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            single = loader.batch_sampler is None
            order = loader.sampler if single else loader.batch_sampler
            first = list(itertools.islice(order, 1))
            if not first:
                raise refused("the training data has no batch", "the pipeline is planned for one", "pass some data")
            chosen: dict[str, Any] = {"sampler": first, "batch_size": None}
            if not single:
                chosen = {"batch_sampler": first}
            return prepare(next(iter(DataLoader(loader.dataset, collate_fn=loader.collate_fn, **chosen))))
    finally:
        random.setstate(own)
        numpy.random.set_state(of_numpy)
        for one, state in states:
            one.set_state(state)

"""Read what a rank keeps from a checkpoint, and take it over once every rank has read its part.

Nothing changes before all of it has been read and checked on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopart.capture.trained import Trained
from autopart.files.checkpoints.document import COMPANION, MASTER, OPTIMIZER, OptimizerState, key_parts
from autopart.files.checkpoints.tensor_files import Stored, StoredTensor, converts
from autopart.files.reading import listed
from autopart.ir.errors import CheckpointError
from autopart.state.extra_state import EXTRA_STATE, key_of, read_extra_state
from autopart.state.optimizers import Optimizers, adopt_state, check_fits


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank wants to read.

    like: tensors of the model that it loads, by name.  known: every name of the model.  driven: names of the parameters
    of its optimizers, by identity.  trained: the model, whose modules may have extra state.  cut: returns the piece of
    a whole tensor that it keeps, by name."""

    like: Mapping[str, torch.Tensor]
    known: frozenset[str]
    driven: Mapping[int, str]
    trained: Trained
    cut: Callable[[str, torch.Tensor], torch.Tensor]

    def piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what it keeps of a tensor that was saved for this parameter or buffer, with memory of its own."""
        own = self.cut(name, tensor) if tensor.dim() else tensor
        return own if own is tensor else own.clone()


@dataclass(frozen=True, slots=True)
class Staged:
    """What a rank has read, in host memory.

    weights, masters: by name.  options: saved options of each parameter group.  state: of the optimizer, by (parameter,
    key).  companions: tensors by companion and name.  extra_state: by module."""

    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    options: list[dict[str, Any]]
    state: dict[tuple[str, str], torch.Tensor]
    companions: dict[str, dict[str, torch.Tensor]]
    extra_state: dict[str, Any]


def staged(
    stored: Stored, wanted: Wanted, optimizers: Optimizers, sources: Sequence[int | None], companions: Iterable[str]
) -> Staged:
    """Read and check what a rank wants.  Local; changes nothing.  Reads whole files once, for their hash.

    sources: the saved parameter group of each one of the optimizers (`matched`).

    Raises CheckpointError for a checkpoint of another model or optimizer, and for files that were changed."""
    _check_names(stored.weights.by_name, wanted)
    saved = stored.document.optimizer
    options: list[dict[str, Any]] = []
    if optimizers:
        if saved is None:
            raise CheckpointError(
                "the checkpoint holds no state of an optimizer", where=str(stored.folder), fix="load without optimizer="
            )
        options = check_fits(optimizers, wanted.driven, saved, sources)
    driven = set(wanted.driven.values()) if optimizers else set()
    keys = [f"{MASTER}/{name}" for name in wanted.like if f"{MASTER}/{name}" in stored.more.by_name]
    keys += [
        f"{OPTIMIZER}/{key}/{name}" for name in driven & (saved.tensors.keys() if saved else set())
        for key in (saved.tensors[name] if saved else ())
    ]  # fmt: skip
    for key in stored.more.by_name:
        kind, title, name = key_parts(key)
        mine = title in set(companions) and (name in wanted.like or name in driven)
        if kind == COMPANION and (mine or title == EXTRA_STATE):
            keys.append(key)
    earlier = {n: key_of(n) for n in wanted.trained.stateful() if key_of(n) in stored.weights.by_name}
    stored.check([*wanted.like, *earlier.values()], keys)
    weights = {name: wanted.piece(name, stored.weights.read(name)) for name in wanted.like}
    result = Staged(weights, {}, options, {}, {}, {})
    for key in keys:
        kind, title, name = key_parts(key)
        tensor = wanted.piece(name, stored.more.read(key))
        if kind == MASTER:
            result.masters[name] = tensor
        elif kind == OPTIMIZER:
            result.state[name, title] = tensor
        else:
            result.companions.setdefault(title, {})[name] = tensor
    extra = result.companions.pop(EXTRA_STATE, {}) | {key: stored.weights.read(key) for key in earlier.values()}
    saved = stored.document.companions.get(EXTRA_STATE, {name: {"$stored": key} for name, key in earlier.items()})
    result.extra_state.update(read_extra_state(wanted.trained, saved, extra))
    return result


def _check_names(found: Mapping[str, StoredTensor], wanted: Wanted) -> None:
    """Raise CheckpointError for names and shapes that are not those of the model."""
    missing, unexpected = sorted(wanted.known - found.keys()), sorted(found.keys() - wanted.known)
    if unexpected:  # earlier releases saved what the model's own state_dict() has besides
        unexpected = sorted(set(unexpected) - wanted.trained.state_dict().keys())
    lines = [f"{name} is missing" for name in missing] + [f"{name} is not in the model" for name in unexpected]
    lines += [
        f"{name} has shape {found[name].shape}, and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.like.items()
        if name in found and found[name].shape != tuple(tensor.shape)
    ]
    lines += [
        f"{name} is of {found[name].dtype}, and of {tensor.dtype} in the model"
        for name, tensor in wanted.like.items()
        if name in found and not converts(found[name].dtype, tensor.dtype)
    ]
    if lines:
        raise CheckpointError(
            "the checkpoint is of another model", why=listed(lines), fix="build the model as in the run that was saved"
        )


def value_for(tensor: torch.Tensor, name: str, found: Staged) -> torch.Tensor:
    """Return the saved value for a tensor of the model: its fp32 master where the tensor can hold it, else its own."""
    master = found.masters.get(name)
    return master if master is not None and tensor.dtype in (torch.float32, torch.float64) else found.weights[name]


def adopt_optimizers(optimizers: Optimizers, names: Mapping[int, str], saved: OptimizerState, found: Staged) -> None:
    """Give the optimizers of this rank their state.  Local."""
    dtypes = {name: (found.masters.get(name, weight)).dtype for name, weight in found.weights.items()}
    adopt_state(optimizers, names, found.options, saved, found.state, dtypes)

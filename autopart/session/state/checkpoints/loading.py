"""Read what a rank keeps from a checkpoint, and take it over once every rank has read its part.

Nothing changes before all of it has been read and checked on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopart.files.checkpoints.document import (
    COMPANION,
    MASTER,
    OPTIMIZER,
    Document,
    OptimizerState,
    check_file,
    problems_with,
)
from autopart.files.checkpoints.tensor_files import INDEX, StoredTensor, TensorFiles, read_index
from autopart.files.reading import listed
from autopart.ir.errors import CheckpointError
from autopart.session.state.checkpoints.optimizers import adopt_state, check_fits


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint that was opened: its document, and where each tensor lies."""

    folder: Path
    document: Document
    weights: TensorFiles
    more: TensorFiles


def opened(folder: Path, document: Document) -> Stored:
    """Open the tensors of a checkpoint; only headers are read.  Raises CheckpointError for files that are missing,
    truncated, or hold other tensors than the index says."""
    names = [name for name in document.files if name.endswith(".safetensors")]
    if INDEX not in document.files:
        raise CheckpointError("the checkpoint has no index of its weights", where=str(folder / INDEX))
    check_file(folder, INDEX, document.files[INDEX])
    weights = [folder / name for name in names if name.startswith("model-")]
    more = [folder / name for name in names if not name.startswith("model-")]
    return Stored(folder, document, TensorFiles(weights, read_index(folder / INDEX)), TensorFiles(more))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank wants to read.

    like: tensors of the model that it loads, by name.  known: every name of the model.  driven: names of the parameters
    of its optimizer, by identity, None without one."""

    like: Mapping[str, torch.Tensor]
    known: frozenset[str]
    driven: Mapping[int, str] | None


@dataclass(frozen=True, slots=True)
class Staged:
    """What a rank has read, in host memory.

    weights, masters: by name.  options: saved options of each parameter group.  state: of the optimizer, by (parameter,
    key).  companions: tensors by companion and name."""

    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    options: list[dict[str, Any]]
    state: dict[tuple[str, str], torch.Tensor]
    companions: dict[str, dict[str, torch.Tensor]]


def staged(
    stored: Stored, wanted: Wanted, optimizer: torch.optim.Optimizer | None, companions: Iterable[str]
) -> Staged:
    """Read and check what a rank wants.  Local; changes nothing.  Reads whole files once, for their hash.

    Raises CheckpointError for a checkpoint of another model or optimizer, and for files that were changed."""
    _check_names(stored.weights.by_name, wanted)
    saved = stored.document.optimizer
    options: list[dict[str, Any]] = []
    if optimizer is not None and wanted.driven is not None:
        if saved is None:
            raise CheckpointError(
                "the checkpoint holds no state of an optimizer", where=str(stored.folder), fix="load without optimizer="
            )
        options = check_fits(optimizer, wanted.driven, saved)
    driven = set(wanted.driven.values()) if optimizer is not None and wanted.driven is not None else set()
    keys = [f"{MASTER}/{name}" for name in wanted.like if f"{MASTER}/{name}" in stored.more.by_name]
    keys += [
        f"{OPTIMIZER}/{key}/{name}" for name in driven & (saved.tensors.keys() if saved else set())
        for key in (saved.tensors[name] if saved else ())
    ]  # fmt: skip
    for key in stored.more.by_name:
        kind, _, rest = key.partition("/")
        title, _, name = rest.partition("/")
        if kind == COMPANION and title in set(companions) and (name in wanted.like or name in driven):
            keys.append(key)
    _check_files(stored, [stored.weights.by_name[name] for name in wanted.like], keys)
    weights = dict(stored.weights.read_all(wanted.like))
    result = Staged(weights, {}, options, {}, {})
    for key, tensor in stored.more.read_all(keys):
        kind, _, rest = key.partition("/")
        title, _, name = rest.partition("/")
        if kind == MASTER:
            result.masters[rest] = tensor
        elif kind == OPTIMIZER:
            result.state[name, title] = tensor
        else:
            result.companions.setdefault(title, {})[name] = tensor
    return result


def _check_names(found: Mapping[str, StoredTensor], wanted: Wanted) -> None:
    """Raise CheckpointError for names and shapes that are not those of the model."""
    missing, unexpected = sorted(wanted.known - found.keys()), sorted(found.keys() - wanted.known)
    lines = [f"{name} is missing" for name in missing] + [f"{name} is not in the model" for name in unexpected]
    lines += [
        f"{name} has shape {found[name].shape}, and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.like.items()
        if name in found and found[name].shape != tuple(tensor.shape)
    ]
    lines += [
        f"{name} is of {found[name].dtype}, and of {tensor.dtype} in the model"
        for name, tensor in wanted.like.items()
        if name in found and _kind(found[name].dtype) != _kind(tensor.dtype)
    ]
    if lines:
        raise CheckpointError(
            "the checkpoint is of another model", why=listed(lines), fix="build the model as in the run that was saved"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "real" if dtype.is_floating_point else str(dtype)


def _check_files(stored: Stored, weights: Iterable[StoredTensor], keys: Iterable[str]) -> None:
    """Compare every file that is read with its size and hash when it was written."""
    names = {tensor.file.name for tensor in weights}
    for key in keys:
        if key not in stored.more.by_name:
            raise CheckpointError(f"tensor {key} is missing", where=str(stored.folder), fix="use another checkpoint")
        names.add(stored.more.by_name[key].file.name)
    for problem in problems_with(stored.folder, {name: stored.document.files[name] for name in names}):
        raise problem


def value_for(tensor: torch.Tensor, name: str, found: Staged) -> torch.Tensor:
    """Return the saved value for a tensor of the model: its fp32 master where the tensor can hold it, else its own."""
    master = found.masters.get(name)
    return master if master is not None and tensor.dtype in (torch.float32, torch.float64) else found.weights[name]


def adopt_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: OptimizerState, found: Staged
) -> None:
    """Give the optimizer of this rank its state.  Local."""
    dtypes = {name: (found.masters.get(name, weight)).dtype for name, weight in found.weights.items()}
    adopt_state(optimizer, names, found.options, saved, found.state, dtypes)

"""What gives values to a model on the meta device, as weights= says: checked before anything is planned, and read
tensor by tensor into the memory where they stay.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping

import torch

from autopart.capture.python.guards import tied_names
from autopart.capture.trained import Trained
from autopart.extras.weights.initial import initial_values, require_initialiser, require_no_leftovers
from autopart.files.checkpoints.document import MASTER, read_document
from autopart.files.checkpoints.folders import found_at
from autopart.files.checkpoints.tensor_files import Stored, StoredTensor, TensorFiles, converts, open_tensors, opened
from autopart.files.reading import listed
from autopart.ir.errors import CheckpointError, RefusedError, UsageError, UsageWarning
from autopart.runtime.tensors import like, without_values

_WIDE = (torch.float32, torch.float64)


class StoredValues:
    """The weights at a path.  Only headers are read before `values`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: a safetensors file, a folder with an index or with such files, or a checkpoint as `Pipe.load` takes it.

        Raises CheckpointError for what is missing, truncated or not in this format."""
        self._path = str(path)
        found = found_at(path)
        self._checkpoint: Stored | None = opened(found, read_document(found)) if found is not None else None
        self._weights: TensorFiles = self._checkpoint.weights if self._checkpoint is not None else open_tensors(path)
        self.by_own_names = found is not None  # of parameters and buffers, whatever a state_dict() makes of them
        self._names: dict[str, str] = {}

    def require(self, wanted: Mapping[str, torch.Tensor], names: Mapping[str, Iterable[str]]) -> None:
        """Find the stored tensor of each wanted one.

        names: all names of each tensor of the model, by first name; a tied one may be stored under any.  Raises
        CheckpointError for those that are missing or have another shape or kind; warns of stored ones without use."""
        stored = self._weights.by_name
        self._names = {first: next((name for name in names[first] if name in stored), "") for first in wanted}
        lines = [f"{first} is missing{_renamed(first, stored)}" for first, name in self._names.items() if not name]
        for first, tensor in wanted.items():
            found = stored.get(self._names[first])
            if found is None:
                continue
            if found.shape != tuple(tensor.shape):
                lines.append(f"{first} has shape {found.shape} there, and {tuple(tensor.shape)} in the model")
            elif not converts(found.dtype, tensor.dtype):
                lines.append(f"{first} is of {found.dtype} there, and of {tensor.dtype} in the model")
        if lines:
            raise CheckpointError(
                "the weights are not those of the model",
                where=self._path,
                why=listed(lines),
                fix="build the model as the one whose weights these are, or pass other files as weights=; "
                "model.save_pretrained and safetensors.torch.save_file write the names of the model",
            )
        unused = sorted(stored.keys() - {name for every in names.values() for name in every})
        if unused:
            warnings.warn(
                f"{len(unused)} tensors in {self._path} are not in the model, such as {unused[0]}",
                UsageWarning,
                stacklevel=2,
            )

    def values(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return new tensors on a device with the stored values.  wanted: as for `require`, some of them.

        Floats become of the dtype of the model.  The files of a checkpoint that have one of them are compared with
        their hashes, and fp32 values that it keeps of half-precision weights are preferred where the model can hold
        them.  Memory: of the tensors, and of one of them on a device that is not the CPU.  Raises CheckpointError."""
        sources = {first: self._source(first, tensor) for first, tensor in wanted.items()}
        if self._checkpoint is not None:
            masters = [f"{MASTER}/{first}" for first, (_, master) in sources.items() if master]
            self._checkpoint.check([self._names[first] for first in wanted], masters)
        made = {}
        for first, (source, _) in sources.items():
            target = made[first] = like(wanted[first], device)
            staged = target if device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
            source.read_into(staged)
            if staged is not target:
                target.detach().copy_(staged)
        return made

    def _source(self, first: str, tensor: torch.Tensor) -> tuple[StoredTensor, bool]:
        """Return where the value of a tensor is read, and whether that is its master."""
        if self._checkpoint is not None and tensor.dtype in _WIDE:
            master = self._checkpoint.more.by_name.get(f"{MASTER}/{first}")
            if master is not None and master.shape == tuple(tensor.shape):
                return master, True
        return self._weights.by_name[self._names[first]], False


def _renamed(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """Return what a missing tensor may be called in the files."""
    other = next((each for each in stored if each.endswith(f".{name}") or name.endswith(f".{each}")), "")
    return (
        f" (there is {other}: the files may be those of a part of the model, or of a model around it)" if other else ""
    )


INITIAL = "init"
"""The value of weights= for the model's own initialisation."""


class Weights:
    """Values for the tensors of a model that are on the meta device.

    Those that a state_dict has come from files, or from the model's own initialisation; a buffer that is not saved gets
    the value that its module gives it (`initial_values`)."""

    def __init__(self, model: Trained, weights: str, seed: int) -> None:
        """Check that there is a value for every tensor.  Reads headers of files, and runs initialisations without
        memory.  Raises CheckpointError and RefusedError, which name the tensor."""
        _require_registered(model)
        self._model, self._seed = model, seed
        every = {name: t for pairs in (model.named_parameters(), model.named_buffers()) for name, t in pairs}
        self.wanted = {name: tensor for name, tensor in every.items() if tensor.is_meta}
        self._stored = StoredValues(weights) if weights != INITIAL else None
        if self._stored is not None and not self._stored.by_own_names and (first := model.own_loading_changes()):
            raise RefusedError(
                f"the weights in {weights} would not go through the loading of the model",
                where=f"module {first}",
                why="a hook or a method of it changes what load_state_dict is given, and needs the whole state; each "
                "rank reads only the tensors that it holds",
                fix="load them into a model with values (model.load_state_dict), and write that with "
                "autopart.save_from(model, folder), by the names of its parameters; then pass weights=folder",
            )
        tied, state = tied_names(model), model.tensors()
        self._saved = saved = {tied.get(name, name) for name in state}
        self._made_here = {name for name in self.wanted if self._stored is None or name not in saved}
        require_no_leftovers(model, seed)
        require_initialiser(model, {name: self.wanted[name] for name in self.wanted if name in self._made_here}, seed)
        if self._stored is not None:
            names: dict[str, list[str]] = {}
            for name in [*every, *tied]:
                names.setdefault(tied.get(name, name), []).append(name)
            self._stored.require({n: t for n, t in self.wanted.items() if n not in self._made_here}, names)

    def values(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return new tensors on a device with the values of these, which are some of `wanted`."""
        own = {name: tensor for name, tensor in wanted.items() if name in self._made_here}
        made = initial_values(self._model, own, self._seed, device) if own else {}
        if self._stored is not None:
            made |= self._stored.values({n: t for n, t in wanted.items() if n not in own}, device)
        return made

    def unsaved(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return what `values` does, after training has begun: for buffers that are not saved.  Raises RefusedError for
        other tensors, which a step or a checkpoint may have changed."""
        changing = {name: tensor for name, tensor in wanted.items() if name in self._saved}
        return without_values(changing) if changing else self.values(wanted, device)


def _require_registered(model: Trained) -> None:
    """Raise RefusedError for a tensor on the meta device that no list of the model has."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise RefusedError(
                    f"{name}.{key} is a tensor on the meta device, and neither a parameter nor a buffer".removeprefix(
                        "."
                    ),
                    why="nothing says what its value is",
                    fix=f'build it with values (device="cpu"), or register_buffer("{key}", ...) and set it in '
                    f"{type(module).__name__}.reset_parameters()",
                )


def weights_for(model: Trained, weights: str | None, seed: int) -> Weights | None:
    """Return what gives a model its values, None if it has them.

    Raises UsageError where weights= and the model do not go together, and what `Weights` raises."""
    first = model.without_values
    if first and weights is None:
        raise UsageError(
            f"{first} is on the meta device: it has no values to train",
            fix='pass weights=: a safetensors file, a folder or a checkpoint, or "init" for the model\'s own '
            "initialisation; or build the model with values; autopart.plan needs none",
        )
    if weights is not None and not first:
        raise UsageError(
            "weights= is given, and the model has values already",
            why="it gives values to a model that was built on the meta device",
            fix='leave weights= out, or build the model inside `with torch.device("meta"):`',
        )
    return Weights(model, weights, seed) if weights is not None else None

"""Values from files: checked by their headers, and read tensor by tensor into the memory where they stay."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping

import torch

from autopart.files.checkpoints.document import MASTER, read_document
from autopart.files.checkpoints.folders import found_at
from autopart.files.checkpoints.stored import Stored, opened
from autopart.files.checkpoints.tensor_files import StoredTensor, TensorFiles, converts, open_tensors
from autopart.files.reading import listed
from autopart.ir.errors import CheckpointError
from autopart.runtime.tensors import like

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
                f"{len(unused)} tensors in {self._path} are not in the model, such as {unused[0]}", stacklevel=2
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

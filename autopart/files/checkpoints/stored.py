"""A checkpoint that was opened: its document, and where each of its tensors lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autopart.files.checkpoints.document import Document, require_unchanged
from autopart.files.checkpoints.tensor_files import INDEX, TensorFiles, read_index
from autopart.ir.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of a checkpoint.  weights: of the model, by name.  more: what else it keeps, by kind and name."""

    folder: Path
    document: Document
    weights: TensorFiles
    more: TensorFiles

    def check(self, weights: Iterable[str], more: Iterable[str] = ()) -> None:
        """Compare every file that has one of these tensors with its size and hash when it was written.

        Reads these files whole.  Raises CheckpointError, also for a tensor that is missing."""
        names = {self.weights.by_name[name].file.name for name in weights}
        for key in more:
            if key not in self.more.by_name:
                raise CheckpointError(f"tensor {key} is missing", where=str(self.folder), fix="use another checkpoint")
            names.add(self.more.by_name[key].file.name)
        require_unchanged(self.folder, {name: self.document.files[name] for name in names})


def opened(folder: Path, document: Document) -> Stored:
    """Open the tensors of a checkpoint; only headers are read.  Raises CheckpointError for files that are missing,
    truncated, or hold other tensors than the index says."""
    names = [name for name in document.files if name.endswith(".safetensors")]
    if INDEX not in document.files:
        raise CheckpointError("the checkpoint has no index of its weights", where=str(folder / INDEX))
    require_unchanged(folder, {INDEX: document.files[INDEX]})
    weights = [folder / name for name in names if name.startswith("model-")]
    more = [folder / name for name in names if not name.startswith("model-")]
    return Stored(folder, document, TensorFiles(weights, read_index(folder / INDEX)), TensorFiles(more))

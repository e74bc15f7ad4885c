"""A checkpoint in the memory of the host, joined from what ranks kept when another one was lost (`rescue`).

    FOLDER/RUN/start-00003/rank-00002/     what rank 2 of the start with number 3 kept: a checkpoint.json, and parts
    FOLDER/RUN/step-00000017/              the checkpoint that was joined from them

FOLDER belongs to the launch (`rescue_folder`), and RUN to the folder of the checkpoints on disk.  The ranks that start
next join the parts, if together these are the whole state after one step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autopart.extras.checkpoints.saving import Draft, publish, read_part, record_at
from autopart.files.checkpoints.document import NAME, Document, OptimizerState, read_document
from autopart.files.checkpoints.folders import LATEST, Root, checkpoint_at, complete, found_at, latest, read_at
from autopart.ir.errors import CheckpointError
from autopart.launcher import rescue_folder
from autopart.runtime.effects import first_line
from autopart.state.optimizers import OptimizerPart, joined

WHY = "why"
"""The file in which a rank says why it kept nothing."""
_ALIKE = ("seed", "world", "precision", "scaler", "scheduler", "companions", "extra")
"""What has to be equal in the documents of all ranks."""

_CANNOT = "training cannot continue from memory: %s"
_log = logging.getLogger("autopart")


def place_of(folder: str | os.PathLike[str]) -> Path | None:
    """Return where the state of a run is kept in memory, None where nothing is.  folder: of its checkpoints."""
    memory = rescue_folder()
    return None if memory is None else memory / hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]


def rank_folder(place: Path, start: int, rank: int) -> Path:
    """Return the folder of what one rank keeps.  start: how often the ranks were started before."""
    return place / f"start-{start:05d}" / f"rank-{rank:05d}"


def newest_at(
    folder: str | os.PathLike[str], names: Collection[str], *, missing_ok: bool
) -> tuple[Path, Document | None]:
    """Return the checkpoint to load from a folder of checkpoints, or from memory if that is further.  On rank 0.

    names: of all parameters and buffers of the model.  Says in one line that the state comes from memory, or why it
    cannot.  Raises CheckpointError if there is no checkpoint, unless missing_ok."""
    path, place = found_at(folder), place_of(folder)
    kept = _kept(place, frozenset(names)) if place is not None else None
    if path is None and kept is None:
        return (Path(folder), None) if missing_ok else (checkpoint_at(folder), None)
    document: Document | None = None
    if path is not None:
        path, document = read_at(folder, lambda found: (found, read_document(found)))
    if kept is not None and (document is None or document.step < kept[1].step):
        saved = "there is no checkpoint" if document is None else f"the last checkpoint is of step {document.step}"
        _log.warning("training continues from memory after step %d; %s", kept[1].step, saved)
        return kept
    assert path is not None
    return path, document


def forget(folder: str | os.PathLike[str]) -> None:
    """Give back the memory of what a newer checkpoint in a folder now has."""
    if (place := place_of(folder)) is not None and place.is_dir():
        _empty(place)


def _empty(place: Path) -> None:
    (place / LATEST).unlink(missing_ok=True)
    for kept in complete(place):
        shutil.rmtree(kept, ignore_errors=True)


def replaced(folder: str | os.PathLike[str], path: Path, error: CheckpointError) -> bool:
    """Return whether another checkpoint than this one, which could not be loaded, is there now.  On rank 0.

    One in memory is dropped, and a line says so; one on the disk may have been deleted for a newer one."""
    if path.parent != place_of(folder):
        return found_at(folder) != path
    _log.warning(_CANNOT, first_line(error))
    _empty(path.parent)
    return True


def _kept(place: Path, names: frozenset[str]) -> tuple[Path, Document] | None:
    """Return the checkpoint in memory, after joining what the last ranks kept; None without one."""
    starts = sorted(place.glob("start-*"))
    if starts and any(starts[-1].iterdir()):
        try:
            why = _join(place, starts[-1], names)
        except (CheckpointError, OSError, ValueError) as error:
            why = first_line(error)
        if why:
            _log.warning(_CANNOT, why)
    for start in starts:
        shutil.rmtree(start, ignore_errors=True)
    try:
        path = latest(place)
        return (path, read_document(path)) if path is not None else None
    except CheckpointError as error:
        _log.warning(_CANNOT, first_line(error))
        _empty(place)
        return None


def _join(place: Path, start: Path, names: frozenset[str]) -> str:
    """Publish the state that the ranks of a start have kept, and return "", or why it is not the state of a step."""
    whys, steps = [], dict[int, list[tuple[Path, Document]]]()
    for folder in sorted(start.iterdir()):
        if (folder / NAME).is_file():
            document = read_document(folder)
            steps.setdefault(document.step, []).append((folder, document))
        elif (folder / WHY).is_file():
            whys.append((folder / WHY).read_text(errors="replace")[:300])
    for step in sorted(steps, reverse=True):
        folders, documents = zip(*steps[step], strict=True)
        parts = {n: each for each in folders for n in range(documents[0].world) if record_at(each, n).is_file()}
        missing = names.difference(*(read_part(each, n).weights for n, each in parts.items()))
        if not missing and len(parts) == documents[0].world:
            _publish(place, _joined(documents), parts)
            return ""
        whys.append(
            f"after step {step} no rank that lives had {len(missing)} tensors, such as {min(missing, default='')}"
        )
    return "; ".join(whys) or "no rank kept its state in time"


def _joined(documents: Sequence[Document]) -> Document:
    """Return the document for the parts of all ranks.  Raises CheckpointError if they differ."""
    first = documents[0]
    for key in _ALIKE:
        if any(getattr(each, key) != getattr(first, key) for each in documents):
            raise CheckpointError(f"the {key} of the ranks differs")
    return replace(first, files={}, optimizer=joined([_part(each.optimizer) for each in documents]))


def _part(state: OptimizerState | None) -> OptimizerPart | None:
    if state is None:
        return None
    values = {(name, key): value for name, each in state.values.items() for key, value in each.items()}
    tensors = {(name, key): None for name, keys in state.tensors.items() for key in keys}
    return OptimizerPart(state.groups, tensors, values)  # type: ignore[arg-type]


def _publish(place: Path, document: Document, parts: Mapping[int, Path]) -> None:
    """Make a checkpoint of parts, which move there.  parts: the folder of each."""
    root = Root(place)
    try:
        draft = Draft(root.draft(document.step), document, 0)
        for number, folder in parts.items():
            for name in read_part(folder, number).files:
                os.rename(folder / name, draft.folder / name)
            os.rename(record_at(folder, number), record_at(draft.folder, number))
        publish(draft, root, 1, None)
    finally:
        root.close()

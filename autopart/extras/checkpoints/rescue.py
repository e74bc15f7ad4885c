"""What a rank keeps in the memory of the host when another one is lost, so that the steps since the last save are not
lost with it; and the checkpoint that the ranks which start next join from that.

    FOLDER/RUN/start-00003/rank-00002/     what rank 2 of the start with number 3 kept: a checkpoint.json, and parts
    FOLDER/RUN/step-00000017/              the checkpoint that was joined from them

FOLDER belongs to the launch (`rescue_folder`), and RUN to the folder of the checkpoints on disk.

A rank writes all whose newest value it has, in one part for each set of ranks that have the same tensors: so two ranks
write equal parts or ones without a common tensor, and these are joined, if together they are the whole state after one
step.  Ranks that share an optimizer state (ZeRO-1) have nothing in common.

The state is that after a complete step at the beginning of `step`, which fails without a trace, if no gradient of an
earlier one waits for the optimizer; and in `save`, where the script says so.  A rank that learns of the loss in another
call keeps nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopart.extras.checkpoints.saving import Draft, publish, read_part, record_at, write_part
from autopart.files.checkpoints.document import NAME, Document, read_document, write_document
from autopart.files.checkpoints.folders import LATEST, Root, checkpoint_at, complete, found_at, latest, read_at
from autopart.files.checkpoints.storage import is_file
from autopart.files.storage import write_whole
from autopart.ir.errors import CheckpointError
from autopart.launcher import rescue_folder, restart_count
from autopart.runtime.activity import KEEPING, NOTHING, READY_TO_KEEP, current
from autopart.runtime.watch.effects import first_line, is_effect
from autopart.session.ranks.call_sync import STEP_FAILED
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.around import Kept, document_of, report_of
from autopart.state.contents import by_keepers, contents_with, own_state, updated_buffers
from autopart.state.core import Core
from autopart.state.optimizers import joined
from autopart.state.schedulers import scheduler_state

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
    return replace(first, files={}, optimizer=joined([each.optimizer for each in documents]))


def _publish(place: Path, document: Document, parts: Mapping[int, Path]) -> None:
    """Make a checkpoint of parts, which move there.  parts: the folder of each."""
    with closing(Root(place)) as root:
        draft = Draft(root.draft(document.step), document, 0)
        for number, folder in parts.items():
            for name in read_part(folder, number).files:
                os.rename(folder / name, draft.folder / name)
            os.rename(record_at(folder, number), record_at(draft.folder, number))
        publish(draft, root, 1, None)


_following: WeakSet[Rescue] = WeakSet()
"""The pipes of this process that would keep their state."""


class Rescue(Listener):
    """What one pipe would keep; nothing, unless its launch has a folder in memory."""

    _session: Session

    def __init__(self, core: Core) -> None:
        self._core = core
        self._kept: Kept | None = None
        self._folder = Path()
        self._unstepped: Mapping[str, Any] | None = None
        self._changed = ""
        self._others: set[int] = set()
        self._unwatch: Callable[[], None] = lambda: None

    def follow(self, kept: Kept) -> None:
        """Keep this state from now on.  Called at a load or a save."""
        place = place_of(kept.folder)
        if place is None or is_file(Path(kept.folder) / NAME):  # a checkpoint by its own path: not of this run
            return
        self._session = self._core.session
        self._folder = place / f"start-{restart_count():05d}" / f"rank-{self._session.world.rank:05d}"
        try:
            self._unstepped = self._moving(kept)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True, mode=0o700)
        except (OSError, CheckpointError):  # nothing can be kept, and training goes on
            return
        if self._kept is None:
            self._unwatch = register_optimizer_step_pre_hook(self._note_optimizer).remove
        self._kept = kept
        self._others.clear()
        _following.add(self)
        current().keeping = READY_TO_KEEP

    def _note_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note what is updated by an optimizer that no load or save was given."""
        if self._kept is not None and optimizer not in self._kept.optimizers:
            self._others.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])

    def _moving(self, kept: Kept) -> dict[str, Any]:
        """Return what the script moves on in every step, besides the optimizer.  Not the position in the data, which
        moves by itself."""
        companions = {title: each.state() for title, each in self._core.companions.items() if title != "data"}
        return {"scheduler": scheduler_state(kept.schedulers, kept.optimizers), **companions}

    def before_call(self, name: str) -> None:
        """Notice what the script changes between a load or a save and the next step: it would do so twice for one step,
        if training went on from that step's beginning."""
        if name != "step" or self._kept is None or self._unstepped is None:
            return
        now, before, self._unstepped = self._moving(self._kept), self._unstepped, None
        changed = [title for title in before if title in now and now[title] != before[title]]
        self._changed = self._changed or next(iter(changed), "")

    def failed(self, doing: str, error: BaseException) -> None:
        """Write the state of this rank, or why that is not the state after a step."""
        if self._kept is None or not is_effect(error):
            return
        session, status = self._session, current()
        status.keeping = KEEPING
        try:
            why = self._refusal(session, self._kept, doing)
            if not why:
                self._write(session, self._kept)
        except Exception as failed:  # a second error must not hide the first
            why = first_line(failed)
        if why:
            with suppress(OSError):
                write_whole(self._folder / WHY, f"rank {session.world.rank}: {why}")
        status.keeping = NOTHING

    def _refusal(self, session: Session, kept: Kept, doing: str) -> str:
        """Return why the present state is not that after a complete step, or ""."""
        if len(_following) > 1:
            return "it trains several pipes, which may have made different numbers of steps"
        if session.standing.context.placement.cuts:
            return "a rank that was lost had pieces of parameters that no other rank has"
        if not kept.optimizers:
            return "no optimizer was passed to load or save"
        if doing == "save":
            return ""
        if doing != STEP_FAILED:
            return f"it was not in pipe.step, but in a call between two steps ({doing})"
        if kept.extra is not None:
            return "extra= of the last save is not known to be that of this step"
        if self._changed:
            return f"the script changes the {self._changed} between a load or a save and the next step"
        if session.captures.trained.stateful():
            return "modules have extra state, and what counts may be that of the rank that was lost"
        driven = session.tensors.driven.values()
        if any(map(_pending, driven)):
            return "gradients of earlier steps wait for the optimizer"
        if self._others.intersection(map(id, driven)):
            return "its parameters are updated by an optimizer that was not passed to load or save"
        return ""

    def _write(self, session: Session, kept: Kept) -> None:
        rank, placement = session.world.rank, session.standing.context.placement
        groups = by_keepers(own_state(session), placement, updated_buffers(session))
        mine = report_of(self._core, kept, contents_with(self._core, (), kept.optimizers).optimizer)
        document = replace(document_of(self._core, [mine]), world=len(groups))
        for number, (ranks, names) in enumerate(groups.items()):
            if rank in ranks or not ranks:
                contents = contents_with(self._core, names, kept.optimizers)
                write_part(Draft(self._folder, document, number), contents.weights, contents.more)
        write_document(self._folder, document)

    def closed(self) -> None:
        """Keep nothing any more: the pipe is closed."""
        if self._kept is None:
            return
        self._kept = None
        self._unwatch()
        _following.discard(self)
        current().keeping = NOTHING
        with suppress(OSError):
            self._folder.rmdir()  # only if nothing was kept there


def _pending(tensor: torch.Tensor) -> bool:
    """Whether a gradient is there that would still change a parameter."""
    grad = tensor.grad
    return grad is not None and (grad.layout != torch.strided or bool(grad.count_nonzero()))

"""The checkpoints of one pipe: collective save and load, and a save that goes on in the background."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autopart.extras.checkpoints.loading import Staged, Wanted, adopt_optimizers, staged, value_for
from autopart.extras.checkpoints.rescue import forget, newest_at, replaced
from autopart.extras.checkpoints.saving import (
    Background,
    Draft,
    config_text,
    publish,
    wait_for_parts,
    write_part,
)
from autopart.files.checkpoints.document import Document
from autopart.files.checkpoints.folders import Root
from autopart.files.checkpoints.tensor_files import opened
from autopart.files.checkpoints.values import decoded
from autopart.ir.errors import CheckpointError, UsageError
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.around import Around, Told, document_of, require_scaler
from autopart.state.contents import Contents, contents_of, driven_names, joined_pieces, own_state
from autopart.state.extra_state import counting_here, give_extra_state, saved_extra_state, warn_of_unsaved
from autopart.state.optimizers import Optimizers, groups_of, matched
from autopart.state.schedulers import saved_schedulers

T = TypeVar("T")
_SAVING, _LOADING = "saving a checkpoint", "loading a checkpoint"


@dataclass(frozen=True, slots=True)
class Request:
    """Where and how to save (`Pipe.save`).  extra: of the user.  keep: how many checkpoints stay, None for all."""

    folder: Path
    extra: Any = None
    keep: int | None = None
    wait: bool = True


class Saver(Listener):
    """Saves and loads the checkpoints of a pipe.  Each rank has one."""

    _session: Session

    def __init__(self) -> None:
        self.root: Root | None = None
        self.background: Background | None = None
        self.copies: Contents | None = None  # of the last save in the background: its memory serves the next one

    def save(self, session: Session, around: Around, request: Request) -> Path:
        """Write a checkpoint; returns its folder, which exists once it is whole.  Collective; see `Pipe.save`."""
        world = session.world
        self.settle(session)
        with together(world, _SAVING):
            contents = contents_of(session, around.optimizers, around.companions, around.placeholder)
            states, tensors = saved_extra_state(counting_here(session))
            if world.rank == 0 and self.root is None:  # the first save
                warn_of_unsaved(session.captures.trained)
            contents.more.update(tensors)
            mine = Told.of(contents.optimizer, around, request.extra, states)
        contents = joined_pieces(session, contents)
        document = document_of(session, world.gather_objects(mine), around.step)
        folder = from_rank(world, 0, _SAVING, partial(self._begin, request.folder, around.step))
        draft = Draft(folder, document, world.rank)
        publishing = partial(self._publish, draft, request, session.captures.model)
        with _erased(draft), together(world, _SAVING):
            if request.wait:
                _written(partial(write_part, draft, contents), draft)
            else:
                contents = self.copies = contents.copied(self.copies)
        if not request.wait:
            self._session = session
            self.background = Background(partial(self._in_background, draft, contents, publishing), draft)
            return draft.folder.with_suffix("")
        with _erased(draft):
            return from_rank(world, 0, _SAVING, publishing)

    def _begin(self, folder: Path, step: int) -> Path:
        """Lock the folder and make the one of this checkpoint.  On rank 0."""
        if self.root is not None and self.root.folder != folder:
            self.root.close()
            self.root = None
        try:
            if self.root is None:
                self.root = Root(folder)
            return self.root.draft(step)
        except OSError as error:
            raise unwritable(folder, error) from error

    def _publish(self, draft: Draft, request: Request, model: nn.Module) -> Path:
        root = self.root
        assert root is not None
        path = _written(lambda: publish(draft, root, request.keep, config_text(model)), draft)
        forget(request.folder)
        return path

    def _in_background(
        self, draft: Draft, contents: Contents, publishing: Callable[[], Path], give_up: threading.Event
    ) -> None:
        _written(partial(write_part, draft, contents), draft)
        if draft.rank == 0 and wait_for_parts(draft, give_up):
            publishing()
        elif draft.rank == 0:
            shutil.rmtree(draft.folder, ignore_errors=True)

    def before_call(self, name: str) -> BaseException | None:
        """Return what failed in the background, until some rank's failure was raised on all."""
        running = self.background
        return None if running is None or running.told else running.failure

    def told(self) -> None:
        """Raise nothing more of the save in the background."""
        if self.background is not None:
            self.background.told = True

    def settle(self, session: Session) -> None:
        """Wait until a save in the background has ended on all ranks; nothing is sent without one, which every rank
        knows alike.  Collective; raises what failed there."""
        mine = self.background
        if mine is None:
            return
        if session.world.rank != 0:
            mine.wait()
        failed = any(row[0] for row in session.world.gather_numbers([float(mine.failure is not None)]))
        if session.world.rank == 0:
            mine.wait(give_up=failed)
        untold = self.before_call("save")
        self._end_background(mine)
        with together(session.world, _SAVING):
            if untold is not None:
                raise untold

    def _end_background(self, ended: Background) -> None:
        """Delete what a save leaves that was not published; while others may still write, nobody does."""
        self.background = None
        if ended.draft.rank == 0:
            shutil.rmtree(ended.draft.folder, ignore_errors=True)

    def closing(self, *, healthy: bool) -> None:
        """Wait for a save in the background, and let other runs use the folder."""
        try:
            if self.background is not None and healthy:
                self._settle_at_close(self._session)
        finally:
            if self.background is not None:  # the ranks are apart: parts of the others may never come
                self.background.wait(give_up=True)
                self._end_background(self.background)
            if self.root is not None:
                self.root.close()
                self.root = None

    def _settle_at_close(self, session: Session) -> None:
        try:
            with session.call("close"):  # agreed first: another rank may make another call
                self.settle(session)
        except CheckpointError:  # of all ranks alike: a part of the save has failed, and others may still be written
            if self.background is not None:
                with session.call("close"):
                    self.settle(session)
            raise

    def load(
        self, session: Session, folder: str | os.PathLike[str], around: Around, *, missing_ok: bool = False
    ) -> tuple[Document | None, Any]:
        """Load a checkpoint; returns its document, None if there was none to load, and what was saved as `extra`.
        Collective; see `Pipe.load`."""
        world = session.world
        self.settle(session)

        own = own_state(session)
        newest = partial(newest_at, folder, own, missing_ok=missing_ok)
        names = driven_names(session, around.placeholder)
        optimizers = around.optimizers
        held, owner = session.tensors.held, session.standing.context.placement.owner
        like = {name: tensor for name, tensor in own.items() if name in held or owner(name) is None}
        wanted = Wanted(like, frozenset(own), names, session.captures.trained, session.tensors.cut)
        while True:
            path, document = from_rank(world, 0, _LOADING, newest)
            if document is None:
                return None, None
            try:
                sources = _sources(session, document, optimizers, names)
                with together(world, _LOADING):
                    session.tensors.masters.write()
                    found = staged(opened(path, document), wanted, optimizers, sources, around.companions)
                break
            except CheckpointError as error:  # on all ranks alike
                if not from_rank(world, 0, _LOADING, partial(replaced, folder, path, error)):
                    raise
        with together(world, _LOADING):
            states = {n: decoded(document.companions[n], n) for n in around.companions if n in document.companions}
            for title, state in states.items():
                around.companions[title].check(state)
            schedules = saved_schedulers(document, around.schedulers, optimizers, sources)
            require_scaler(document)
            known = document.companions
            absent = sorted(n for n, each in around.companions.items() if n not in known and each.tensors())
            if absent:
                raise CheckpointError(f"the checkpoint holds no state of {absent[0]}", fix="register it after the load")
            extra = decoded(document.extra, "extra")
        _adopt(session, like, found)
        if optimizers and document.optimizer is not None:
            adopt_optimizers(optimizers, names, document.optimizer, found)
        for scheduler, schedule in zip(around.schedulers, schedules, strict=True):
            scheduler.load_state_dict(schedule)
        for title, state in states.items():
            around.companions[title].load(state, found.companions.get(title, {}))
        with together(world, "giving modules their extra state"):
            give_extra_state(session.captures.trained, found.extra_state)
        return document, extra


@contextmanager
def _erased(draft: Draft) -> Iterator[None]:
    """Delete the folder of a checkpoint whose writing fails, on rank 0, and let the error pass."""
    try:
        yield
    except BaseException:
        if draft.rank == 0:
            shutil.rmtree(draft.folder, ignore_errors=True)
        raise


def _written(work: Callable[[], T], draft: Draft) -> T:
    """Run a part of the writing; errors of the system become CheckpointError."""
    try:
        return work()
    except OSError as error:
        raise unwritable(draft.folder, error) from error


def unwritable(folder: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that the system did not let be written."""
    file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    if file is not None:
        return CheckpointError(
            "the checkpoint cannot be written",
            where=str(folder),
            why=f"{file} is a file, and a checkpoint is a folder, to which each rank writes its part",
            fix=f"pass a folder, such as {file.with_suffix('')}, or move that file",
        )
    return CheckpointError(
        "the checkpoint cannot be written",
        where=str(folder),
        why=str(error),
        fix="free space or pass another folder; the last complete checkpoint is unharmed, and training can go on",
    )


def _sources(
    session: Session, document: Document, optimizers: Optimizers, names: Mapping[int, str]
) -> tuple[int | None, ...]:
    """Return the saved parameter group of each group of the optimizers on all ranks, () if there is none.  Collective.

    Raises on all ranks for groups that do not fit, and if state was saved for a parameter that is trained now and that
    no rank's optimizer has."""
    saved = document.optimizer
    if not optimizers or saved is None:
        return ()
    with together(session.world, _LOADING):
        mine = groups_of(optimizers, names)
    every = session.world.gather_objects(mine)
    trained = {param.name for param in session.graph.params if param.trainable}
    lost = sorted(saved.tensors.keys() & trained - {name for own in every for group in own for name in group.names})
    try:
        if lost:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {lost[0]}, and no rank's optimizer updates it",
                why=f"{len(lost)} parameters would be trained without their state",
                fix="make each rank's optimizer from all of pipe.parameters()",
            )
        return matched(every, saved)
    except CheckpointError as error:
        raise session.world.known(error) from None


def _adopt(session: Session, like: Mapping[str, torch.Tensor], found: Staged) -> None:
    """Write what was read into the model and into what this rank holds; gradients go.  Local."""
    held, masters = session.tensors.held, session.tensors.masters
    with torch.no_grad():
        for name, tensor in like.items():
            target = held.get(name, tensor)
            value = value_for(target, name, found)
            target.copy_(value)
            if tensor is not target and tensor.device.type != "meta":
                session.tensors.cut(name, tensor).copy_(value)
            if name in masters.by_name:
                masters.by_name[name].copy_(found.masters.get(name, found.weights[name]))
    masters.write()
    for tensor in session.tensors.driven.values():
        tensor.grad = None


def require_folder(folder: Any, keep: int | None) -> None:
    """Raise UsageError for arguments of `Pipe.save` that cannot work."""
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"the folder is a {type(folder).__name__}", fix='pass a path, such as "runs/a"')
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise UsageError(f"keep is {keep!r}", fix="pass how many checkpoints stay, 1 or more, or None for all")

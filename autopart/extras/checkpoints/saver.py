"""Saving a pipe from all ranks, at once or in the background, to folders that one run writes to."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from autopart.extras.checkpoints.rescue import forget
from autopart.extras.checkpoints.saving import (
    Background,
    Draft,
    config_text,
    publish,
    wait_for_parts,
    write_part,
    writing,
)
from autopart.files.checkpoints.folders import Root
from autopart.ir.errors import CheckpointError
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.around import Kept, document_of, told
from autopart.state.contents import Contents, contents_of, joined_pieces
from autopart.state.core import Core
from autopart.state.extra_state import counting_here, saved_extra_state, warn_of_unsaved

_SAVING = "saving a checkpoint"


class Saver(Listener):
    """Saves the checkpoints of a pipe.  Each rank has one."""

    _session: Session

    def __init__(self, core: Core) -> None:
        self._core = core
        self.root: Root | None = None
        self.background: Background | None = None
        self.copies: Contents | None = None  # of the last save in the background: its memory serves the next one

    def save(self, session: Session, kept: Kept, keep: int | None, *, wait: bool) -> Path:
        """Write a checkpoint; returns its folder, which exists once it is whole.  Collective; see `Pipe.save`."""
        world = session.world
        self.settle(session)
        with together(world, _SAVING):
            contents = contents_of(self._core, kept.optimizers)
            states, tensors = saved_extra_state(counting_here(session))
            if world.rank == 0 and self.root is None:  # the first save
                warn_of_unsaved(session.captures.trained)
            contents.more.update(tensors)
            mine = told(self._core, kept, contents.optimizer, states)
        contents = joined_pieces(session, contents)
        document = document_of(self._core, world.gather_objects(mine))
        folder = from_rank(world, 0, _SAVING, partial(self._begin, Path(kept.folder)))
        draft = Draft(folder, document, world.rank)

        def write() -> None:
            with writing(draft.folder):
                write_part(draft, contents)

        def published() -> Path:
            assert self.root is not None
            with writing(draft.folder):
                path = publish(draft, self.root, keep, config_text(session.captures.model))
            forget(kept.folder)
            return path

        def in_background(give_up: threading.Event) -> None:
            write()
            if draft.rank == 0 and wait_for_parts(draft, give_up):
                published()
            elif draft.rank == 0:
                shutil.rmtree(draft.folder, ignore_errors=True)

        with _erased(draft), together(world, _SAVING):
            if wait:
                write()
            else:
                contents = self.copies = contents.copied(self.copies)
        if not wait:
            self._session = session
            self.background = Background(in_background, draft)
            return draft.folder.with_suffix("")
        with _erased(draft):
            return from_rank(world, 0, _SAVING, published)

    def _begin(self, folder: Path) -> Path:
        """Lock the folder and make the one of this checkpoint.  On rank 0."""
        if self.root is not None and self.root.folder != folder:
            self.root.close()
            self.root = None
        with writing(folder):
            if self.root is None:
                self.root = Root(folder)
            return self.root.draft(self._core.steps)

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


@contextmanager
def _erased(draft: Draft) -> Iterator[None]:
    """Delete the folder of a checkpoint whose writing fails, on rank 0, and let the error pass."""
    try:
        yield
    except BaseException:
        if draft.rank == 0:
            shutil.rmtree(draft.folder, ignore_errors=True)
        raise

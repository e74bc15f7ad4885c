"""The part of a pipe that saves and loads checkpoints, and keeps the state of a rank when another one is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autopart.extras.checkpoints.loading import load
from autopart.extras.checkpoints.rescue import Rescue, forget
from autopart.extras.checkpoints.saving import (
    Background,
    Draft,
    config_text,
    publish,
    require_folder,
    wait_for_parts,
    write_part,
    writing,
)
from autopart.files.checkpoints.folders import Root
from autopart.ir.errors import CheckpointError, UsageError
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.around import Kept, document_of, report_of
from autopart.state.contents import Contents, contents_of, joined_pieces
from autopart.state.core import Core, Part
from autopart.state.extra_state import counting_here, saved_extra_state, warn_of_unsaved
from autopart.state.optimizers import GivenOptimizer, given_as
from autopart.state.schedulers import GivenScheduler

_SAVING = "saving a checkpoint"


class Checkpoints(Part, Listener):
    """The checkpoints of a pipe.  Each rank has one.

    root: the folder that this run writes to, on rank 0.  background: a save that goes on, or has ended and was not
    waited for.  copies: of the last save in the background: its memory serves the next one."""

    _session: Session

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.rescue = Rescue(core)
        self.root: Root | None = None
        self.background: Background | None = None
        self.copies: Contents | None = None

    def save(
        self,
        folder: str | os.PathLike[str],
        optimizer: GivenOptimizer = None,
        scheduler: GivenScheduler = None,
        extra: Any = None,
        *,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Save a checkpoint from all ranks, and return its folder, `folder/step-00000010` after ten steps.  Collective.

        Every rank writes its own part to a folder that all ranks see; no rank gathers the model.  The folder has the
        weights in safetensors by their original names, with the index of Hugging Face's loaders, and
        `checkpoint.json`.  It appears under its name only when it is complete; a crash at any time leaves the previous
        one.  Gradients are not saved: call it after `optimizer.step()`.

        optimizer: this rank's, or a list of them; the state is saved under the parameters' names.  scheduler: a
        learning rate scheduler, or a list of them, alike on every rank.  extra: numbers, texts, lists and dicts; those
        of rank 0 are saved.  keep: delete all but the newest `keep` checkpoints afterwards.  wait: False copies the
        state to host memory and writes it in the background; a failure there is raised by the next call on all ranks,
        and `close` waits.

        Raises CheckpointError on all ranks; the pipe and earlier checkpoints are then as before.
        """
        require_folder(folder, keep)
        kept = Kept(folder, given_as("optimizer", optimizer), given_as("scheduler", scheduler), extra)
        self.rescue.follow(kept)
        with self.core.session.call("save") as session:
            return self._save(session, kept, keep, wait=wait)

    def load(
        self,
        folder: str | os.PathLike[str],
        optimizer: GivenOptimizer = None,
        scheduler: GivenScheduler = None,
        *,
        missing_ok: bool = False,
    ) -> Any:
        """Load the newest checkpoint of a folder, or the one whose folder this is, and return its `extra`.  Collective.

        The plan may differ from the one that was saved: stages, replicas, ranks, slices, ZeRO, precision.  Each rank
        reads its own part.  Weights, buffers, masters, `steps`, the loss scale, and the state of the optimizer and the
        scheduler become those of the checkpoint; gradients become None.  Everything is read and compared with its hash
        on all ranks first: after a CheckpointError nothing has changed.

        missing_ok: True to change nothing and return None, instead of raising, if rank 0 finds no checkpoint there.
        """
        require_folder(folder, None)
        kept = Kept(folder, given_as("optimizer", optimizer), given_as("scheduler", scheduler))
        with self.core.session.call("load") as session:
            self.settle(session)
            document, extra = load(self.core, kept, missing_ok=missing_ok)
        if document is not None:
            self.core.steps = document.step
            if document.scaler is not None:
                self.core.loss_scale.load_state_dict(document.scaler)
        self.rescue.follow(replace(kept, extra=extra))
        return extra

    @property
    def listeners(self) -> Sequence[Listener]:
        """Calls raise what fails in the background, and a failure is followed by what can be kept."""
        return self, self.rescue

    def _save(self, session: Session, kept: Kept, keep: int | None, *, wait: bool) -> Path:
        """Write a checkpoint; returns its folder, which exists once it is whole.  Collective; see `Pipe.save`."""
        world = session.world
        most, least = world.reduce_numbers([float(wait), -float(wait)])
        if most != -least:
            raise world.known(UsageError("wait= differs between ranks", fix="pass the same on every rank"))
        self.settle(session)
        with together(world, _SAVING):
            contents = contents_of(self.core, kept.optimizers)
            states, tensors = saved_extra_state(counting_here(session))
            if world.rank == 0 and self.root is None:  # the first save
                warn_of_unsaved(session.captures.trained)
            contents.more.update(tensors)
            mine = report_of(self.core, kept, contents.optimizer, states)
        contents = joined_pieces(session, contents)
        document = document_of(self.core, world.gather_objects(mine))
        folder = from_rank(world, 0, _SAVING, partial(self._begin, Path(kept.folder)))
        draft = Draft(folder, document, world.rank)

        def write() -> None:
            with writing(draft.folder):
                write_part(draft, contents.weights, contents.more)

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
                draft.erase()

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
            return self.root.draft(self.core.steps)

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
            ended.draft.erase()

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
            draft.erase()
        raise

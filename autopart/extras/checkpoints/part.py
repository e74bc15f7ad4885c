"""The part of a pipe that saves and loads checkpoints, and keeps the state of a rank when another one is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopart.extras.checkpoints.loading import load
from autopart.extras.checkpoints.rescue import Rescue
from autopart.extras.checkpoints.saver import Saver
from autopart.extras.checkpoints.saving import require_folder
from autopart.session.ranks.listener import Listener
from autopart.state.around import Kept
from autopart.state.core import Core, Part
from autopart.state.optimizers import GivenOptimizer, given_as
from autopart.state.schedulers import GivenScheduler


class Checkpoints(Part):
    """The checkpoints of a pipe."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.saver, self.rescue = Saver(core), Rescue(core)

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
            return self.saver.save(session, kept, keep, wait=wait)

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
            self.saver.settle(session)
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
        return self.saver, self.rescue

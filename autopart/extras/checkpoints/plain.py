"""Checkpoints of a plain model in one process: loaded from those of a pipe, and written for one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.capture.python.guards import tied_names
from autopart.capture.trained import Trained
from autopart.extras.checkpoints.loading import Staged, Wanted, adopt_state, staged, value_for
from autopart.extras.checkpoints.saving import Draft, config_text, publish, require_folder, write_part, writing
from autopart.files.checkpoints.document import OPTIMIZER, Document, read_document
from autopart.files.checkpoints.folders import Root, read_at
from autopart.files.checkpoints.values import decoded, encoded
from autopart.state.around import Kept, version
from autopart.state.contents import tied_once
from autopart.state.extra_state import EXTRA_STATE, give_extra_state, saved_extra_state, warn_of_unsaved
from autopart.state.optimizers import GivenOptimizer, given_as, groups_of, joined, matched, state_of
from autopart.state.schedulers import GivenScheduler, saved_schedulers, scheduler_state


def load_into(
    model: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: GivenOptimizer = None,
    scheduler: GivenScheduler = None,
) -> Any:
    """Load a checkpoint into a plain model, its optimizer and its scheduler, in one process; returns `extra`.

    folder: as for `Pipe.load`.  The checkpoint may have been written by a pipe under any plan, or by `save_from`.
    Everything is read and compared with its hash first: after a CheckpointError nothing has changed.
    """
    kept = Kept(folder, given_as("optimizer", optimizer), given_as("scheduler", scheduler))
    trained = Trained(model)
    own, names = _own(trained)
    wanted = Wanted(own, frozenset(own), names, trained, kept)

    def read(path: Path) -> tuple[Document, Staged, list[dict[str, Any]]]:
        document = read_document(path)
        saved = document.optimizer
        sources = matched([groups_of(kept.optimizers, names)], saved) if kept.optimizers and saved is not None else ()
        found = staged(path, document, wanted, sources)
        return document, found, saved_schedulers(document, kept.schedulers, kept.optimizers, sources)

    document, found, schedules = read_at(folder, read)
    extra = decoded(document.extra, "extra")
    _copy(own, found)
    give_extra_state(trained, found.extra_state)
    if trained.own_loading():  # what its hooks do besides, such as values that they derive
        try:
            trained.load_state_dict(trained.state_dict(), strict=False)
        finally:
            _copy(own, found)  # its state_dict() may round
    adopt_state(document, wanted, found, schedules)
    return extra


def save_from(
    model: nn.Module,
    folder: str | os.PathLike[str],
    optimizer: GivenOptimizer = None,
    scheduler: GivenScheduler = None,
    extra: Any = None,
    *,
    step: int = 0,
    keep: int | None = None,
) -> Path:
    """Save a checkpoint of a plain model in one process, which a pipe can load under any plan; returns its folder.

    step: training steps taken, which the pipe goes on counting.  Else as `Pipe.save`.  Raises CheckpointError."""
    require_folder(folder, keep)
    optimizers, schedulers = given_as("optimizer", optimizer), given_as("scheduler", scheduler)
    trained = Trained(model)
    own, names = _own(trained)
    state, held = state_of(optimizers, names) if optimizers else (None, {})
    states, tensors = saved_extra_state(trained.stateful())
    tensors |= {f"{OPTIMIZER}/{key}/{name}": tensor for (name, key), tensor in held.items()}
    warn_of_unsaved(trained)
    document = Document(
        step,
        torch.__version__,
        version(),
        {},
        companions={EXTRA_STATE: states} if states else {},
        optimizer=joined([state]),
        scheduler=scheduler_state(schedulers, optimizers),
        extra=encoded(extra, "extra"),
    )
    with writing(Path(folder)), closing(Root(Path(folder))) as root:
        draft = Draft(root.draft(step), document, 0)
        write_part(draft, own, tensors)
        return publish(draft, root, keep, config_text(model))


def _own(trained: Trained) -> tuple[dict[str, torch.Tensor], Mapping[int, str]]:
    """Return the parameters and persistent buffers of a model, tied ones once, and the names of its parameters."""
    own = tied_once(trained.tensors(), tied_names(trained))
    return own, {id(parameter): name for name, parameter in trained.named_parameters()}


def _copy(own: Mapping[str, torch.Tensor], found: Staged) -> None:
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(value_for(tensor, name, found))

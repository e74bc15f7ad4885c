"""Read what a rank keeps from a checkpoint, and take it over once every rank has read its part.

Nothing changes before all of it has been read and checked on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopart.capture.trained import Trained
from autopart.extras.checkpoints.rescue import newest_at, replaced
from autopart.files.checkpoints.document import COMPANION, MASTER, OPTIMIZER, Document, key_parts
from autopart.files.checkpoints.tensor_files import StoredTensor, converts, opened
from autopart.files.checkpoints.values import decoded
from autopart.files.reading import listed
from autopart.ir.errors import CheckpointError
from autopart.session.ranks.agreement import from_rank, together
from autopart.session.session import Session
from autopart.state.around import Kept, require_scaler
from autopart.state.contents import driven_names, own_state
from autopart.state.core import Core
from autopart.state.extra_state import EXTRA_STATE, give_extra_state, key_of, read_extra_state
from autopart.state.optimizers import check_fits, give_state, groups_of, matched
from autopart.state.schedulers import saved_schedulers

_LOADING = "loading a checkpoint"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a rank wants to read.

    like: tensors of the model that it loads, by name.  known: every name of the model.  driven: names of the parameters
    of its optimizers, by identity.  trained: the model, whose modules may have extra state.  kept: the optimizers and
    schedulers.  companions: titles of what else is loaded.  cut: returns the piece of a whole tensor that it keeps, by
    name."""

    like: Mapping[str, torch.Tensor]
    known: frozenset[str]
    driven: Mapping[int, str]
    trained: Trained
    kept: Kept
    companions: Collection[str] = ()
    cut: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor

    def piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what it keeps of a tensor that was saved for this parameter or buffer, with memory of its own."""
        own = self.cut(name, tensor) if tensor.dim() else tensor
        return own if own is tensor else own.clone()


@dataclass(frozen=True, slots=True)
class Staged:
    """What a rank has read, in host memory.

    weights, masters: by name.  options: saved options of each parameter group.  state: of the optimizer, by (parameter,
    key).  companions: tensors by companion and name.  extra_state: by module."""

    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    options: list[dict[str, Any]]
    state: dict[tuple[str, str], torch.Tensor]
    companions: dict[str, dict[str, torch.Tensor]]
    extra_state: dict[str, Any]


def staged(folder: Path, document: Document, wanted: Wanted, sources: Sequence[int | None]) -> Staged:
    """Read and check what a rank wants of a checkpoint.  Local; changes nothing.  Reads whole files once, for their
    hash.

    sources: the saved parameter group of each one of the optimizers (`matched`).

    Raises CheckpointError for a checkpoint of another model or optimizer, and for files that were changed."""
    stored, optimizers = opened(folder, document), wanted.kept.optimizers
    _check_names(stored.weights.by_name, wanted)
    saved = document.optimizer
    options: list[dict[str, Any]] = []
    if optimizers:
        if saved is None:
            raise CheckpointError(
                "the checkpoint holds no state of an optimizer", where=str(folder), fix="load without optimizer="
            )
        options = check_fits(optimizers, wanted.driven, saved, sources)
    driven = set(wanted.driven.values()) if optimizers else set()
    keys = [f"{MASTER}/{name}" for name in wanted.like if f"{MASTER}/{name}" in stored.more.by_name]
    keys += [
        f"{OPTIMIZER}/{key}/{name}" for name in driven & (saved.tensors.keys() if saved else set())
        for key in (saved.tensors[name] if saved else ())
    ]  # fmt: skip
    for key in stored.more.by_name:
        kind, title, name = key_parts(key)
        mine = title in wanted.companions and (name in wanted.like or name in driven)
        if kind == COMPANION and (mine or title == EXTRA_STATE):
            keys.append(key)
    earlier = {n: key_of(n) for n in wanted.trained.stateful() if key_of(n) in stored.weights.by_name}
    stored.check([*wanted.like, *earlier.values()], keys)
    weights = {name: wanted.piece(name, stored.weights.read(name)) for name in wanted.like}
    result = Staged(weights, {}, options, {}, {}, {})
    for key in keys:
        kind, title, name = key_parts(key)
        tensor = wanted.piece(name, stored.more.read(key))
        if kind == MASTER:
            result.masters[name] = tensor
        elif kind == OPTIMIZER:
            result.state[name, title] = tensor
        else:
            result.companions.setdefault(title, {})[name] = tensor
    extra = result.companions.pop(EXTRA_STATE, {}) | {key: stored.weights.read(key) for key in earlier.values()}
    saved = document.companions.get(EXTRA_STATE, {name: {"$stored": key} for name, key in earlier.items()})
    result.extra_state.update(read_extra_state(wanted.trained, saved, extra))
    return result


def _check_names(found: Mapping[str, StoredTensor], wanted: Wanted) -> None:
    """Raise CheckpointError for names and shapes that are not those of the model."""
    missing, unexpected = sorted(wanted.known - found.keys()), sorted(found.keys() - wanted.known)
    if unexpected:  # earlier releases saved what the model's own state_dict() has besides
        unexpected = sorted(set(unexpected) - wanted.trained.state_dict().keys())
    lines = [f"{name} is missing" for name in missing] + [f"{name} is not in the model" for name in unexpected]
    lines += [
        f"{name} has shape {found[name].shape}, and {tuple(tensor.shape)} in the model"
        for name, tensor in wanted.like.items()
        if name in found and found[name].shape != tuple(tensor.shape)
    ]
    lines += [
        f"{name} is of {found[name].dtype}, and of {tensor.dtype} in the model"
        for name, tensor in wanted.like.items()
        if name in found and not converts(found[name].dtype, tensor.dtype)
    ]
    if lines:
        raise CheckpointError(
            "the checkpoint is of another model", why=listed(lines), fix="build the model as in the run that was saved"
        )


def value_for(tensor: torch.Tensor, name: str, found: Staged) -> torch.Tensor:
    """Return the saved value for a tensor of the model: its fp32 master where the tensor can hold it, else its own."""
    master = found.masters.get(name)
    return master if master is not None and tensor.dtype in (torch.float32, torch.float64) else found.weights[name]


def adopt_state(document: Document, wanted: Wanted, found: Staged, schedules: Sequence[dict[str, Any]]) -> None:
    """Give the optimizers and schedulers of this rank their state.  Local.  schedules: of `saved_schedulers`."""
    if wanted.kept.optimizers and document.optimizer is not None:
        dtypes = {name: found.masters.get(name, weight).dtype for name, weight in found.weights.items()}
        give_state(wanted.kept.optimizers, wanted.driven, found.options, document.optimizer, found.state, dtypes)
    for scheduler, state in zip(wanted.kept.schedulers, schedules, strict=True):
        scheduler.load_state_dict(state)


def load(core: Core, kept: Kept, *, missing_ok: bool = False) -> tuple[Document | None, Any]:
    """Load a checkpoint; returns its document, None if there was none to load, and what was saved as `extra`.
    Collective; see `Pipe.load`."""
    session, folder, companions = core.session, kept.folder, core.companions
    world, tensors = session.world, session.tensors
    own, owner = own_state(session), session.standing.context.placement.owner
    newest = partial(newest_at, folder, own, missing_ok=missing_ok)
    like = {name: tensor for name, tensor in own.items() if name in tensors.held or owner(name) is None}
    names, trained = driven_names(core), session.captures.trained
    wanted = Wanted(like, frozenset(own), names, trained, kept, companions, tensors.cut)
    while True:
        path, document = from_rank(world, 0, _LOADING, newest)
        if document is None:
            return None, None
        try:
            sources = _sources(session, document, wanted)
            with together(world, _LOADING):
                tensors.masters.write()
                found = staged(path, document, wanted, sources)
            break
        except CheckpointError as error:  # on all ranks alike
            if not from_rank(world, 0, _LOADING, partial(replaced, folder, path, error)):
                raise
    with together(world, _LOADING):
        states = {n: decoded(document.companions[n], n) for n in companions if n in document.companions}
        for title, state in states.items():
            companions[title].check(state)
        schedules = saved_schedulers(document, kept.schedulers, kept.optimizers, sources)
        require_scaler(document)
        absent = sorted(n for n, each in companions.items() if n not in document.companions and each.tensors())
        if absent:
            raise CheckpointError(f"the checkpoint holds no state of {absent[0]}", fix="register it after the load")
        extra = decoded(document.extra, "extra")
    _adopt(session, like, found)
    adopt_state(document, wanted, found, schedules)
    for title, state in states.items():
        companions[title].load(state, found.companions.get(title, {}))
    with together(world, "giving modules their extra state"):
        give_extra_state(trained, found.extra_state)
    return document, extra


def _sources(session: Session, document: Document, wanted: Wanted) -> tuple[int | None, ...]:
    """Return the saved parameter group of each group of the optimizers on all ranks, () if there is none.  Collective.

    Raises on all ranks for groups that do not fit, and if state was saved for a parameter that is trained now and that
    no rank's optimizer has."""
    saved = document.optimizer
    if saved is None:
        return ()
    with together(session.world, _LOADING):
        mine = groups_of(wanted.kept.optimizers, wanted.driven)
    every = session.world.gather_objects(mine)
    if not any(every):
        return ()
    trained = {param.name for param in session.graph.params if param.trainable}
    lost = sorted(saved.tensors.keys() & trained - {name for own in every for group in own for name in group.names})
    try:
        found = matched(every, saved)
        if lost:
            raise CheckpointError(
                f"the checkpoint has optimizer state of {lost[0]}, and no rank's optimizer updates it",
                why=f"{len(lost)} parameters would be trained without their state",
                fix="make each rank's optimizer from all of pipe.parameters()",
            )
        return found
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
                session.tensors.write(name, tensor, value)
            if name in masters.by_name:
                masters.by_name[name].copy_(found.masters.get(name, found.weights[name]))
    masters.write()
    for tensor in session.tensors.driven.values():
        tensor.grad = None

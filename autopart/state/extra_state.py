"""Extra state of modules (`get_extra_state`): which rank's counts, and how it moves and is kept in checkpoints.

That of a module counts on the rank whose value counts of the first parameter or buffer in it, on rank 0 without one.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopart.capture.trained import Trained
from autopart.files.checkpoints.document import COMPANION
from autopart.files.checkpoints.values import decoded, encoded
from autopart.ir.errors import CheckpointError, UsageWarning
from autopart.session.ranks.agreement import together
from autopart.session.session import Session

EXTRA_STATE = "extra_state"
"""What checkpoints call it, among `Document.companions`."""


def key_of(name: str) -> str:
    """Return what torch calls the extra state of a module in a state."""
    return f"{name}._extra_state" if name else "_extra_state"


def counting_here(session: Session) -> dict[str, nn.Module]:
    """Return the modules whose extra state counts on this rank.  Local."""
    trained, tied, owner = session.captures.trained, session.tied, session.standing.context.placement.owner
    homes = {name: rank for name in trained.tensors() if (rank := owner(tied.get(name, name))) is not None}
    return {
        path: module
        for path, module in trained.stateful().items()
        if next((rank for name, rank in homes.items() if name.startswith(path and f"{path}.")), 0) == session.world.rank
    }


def gather_extra_state(session: Session) -> dict[str, Any]:
    """Return the extra state of every module that counts on another rank, by the module's name.  Collective.

    A warning names one that cannot be sent; there each rank has its own."""
    world = session.world
    if world.size == 1 or not session.captures.trained.stateful():
        return {}
    everyone = world.gather_objects({name: _sent(module) for name, module in counting_here(session).items()})
    theirs = {name: sent for rank, own in enumerate(everyone) if rank != world.rank for name, sent in own.items()}
    for name, why in theirs.items():
        if isinstance(why, str):
            warnings.warn(
                f"the extra state of {name or 'the model'} cannot be sent between ranks, and stays that of this rank "
                f"({why}); let get_extra_state() return tensors, numbers, texts, lists and dicts",
                UsageWarning,
                stacklevel=2,
            )
    return {name: pickle.loads(sent) for name, sent in theirs.items() if isinstance(sent, bytes)}


def _sent(module: nn.Module) -> bytes | str:
    """Return extra state pickled, with tensors on the CPU, or why it cannot be."""
    try:
        state = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), module.get_extra_state())
        pickle.loads(sent := pickle.dumps(state))
    except Exception as error:  # of the model's own code too
        return f"{type(error).__name__}: {error}"
    return sent


def sync_extra_state(session: Session) -> None:
    """Give the modules of this rank's model the extra state of the ranks where it counts.  Collective."""
    modules, states = session.captures.trained.stateful(), gather_extra_state(session)
    if modules:
        with together(session.world, "giving modules their extra state"):
            changed = {name: new for name, new in states.items() if not _same(new, modules[name].get_extra_state())}
            give_extra_state(session.captures.trained, changed)


def _same(one: Any, other: Any) -> bool:
    """Return whether two states are equal; False where they cannot be compared.  (Pickled tensors never are.)"""
    (own, spec), (others, other_spec) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    try:
        return spec == other_spec and all(
            type(a) is type(b)
            and (a.dtype == b.dtype and torch.equal(a, b.detach().cpu()) if isinstance(a, torch.Tensor) else a == b)
            for a, b in zip(own, others, strict=True)
        )
    except Exception:  # of the model's own classes too
        return False


def give_extra_state(trained: Trained, states: Mapping[str, Any]) -> None:
    """Give modules their extra state, as `load_state_dict` does."""
    for name, module in trained.stateful().items():
        if name in states and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(states[name])


def saved_extra_state(modules: Mapping[str, nn.Module]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the extra state of modules as a checkpoint keeps it: as JSON can hold it, and the tensors in it by what
    they are called there.  Raises CheckpointError for other objects, and for a module that cannot take it back."""
    states, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    for name, module in modules.items():
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"module {name or type(module).__name__} has get_extra_state and no set_extra_state",
                why="its extra state could not be loaded",
                fix="give its class both, or none",
            )
        states[name] = encoded(module.get_extra_state(), f"the extra state of module {name}".rstrip(), tensors)
    return states, {f"{COMPANION}/{EXTRA_STATE}/{key}": tensor for key, tensor in tensors.items()}


def warn_of_unsaved(trained: Trained) -> None:
    """Warn of entries besides tensors that hooks add to the model's own state: checkpoints do not keep them."""
    added: list[str] = []
    with suppress(Exception):  # of the model's own code, which a checkpoint does not need
        state, own = trained.state_dict().keys(), trained.tensors().keys()
        if not own - state:  # else they may be made of those that are left out, which checkpoints keep
            added = sorted(state - own - set(map(key_of, trained.stateful())))
    if added:
        warnings.warn(
            f"a checkpoint does not keep {added[0]}, which the model's state_dict() has ({len(added)} such entries): "
            "it is neither a parameter, a buffer nor extra state; make it one of these if a load has to bring it back",
            UsageWarning,
            stacklevel=2,
        )


def read_extra_state(trained: Trained, saved: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what `saved_extra_state` kept for the modules of a model.  Raises CheckpointError for other modules."""
    known, saved = trained.stateful().keys(), saved if isinstance(saved, dict) else {}
    for wrong in sorted(saved.keys() ^ known):
        raise CheckpointError(
            "the checkpoint is of another model",
            why=f"the extra state of module {wrong} is {'missing' if wrong in known else 'not in the model'}",
            fix="build the model as in the run that was saved",
        )
    return {name: decoded(state, f"the extra state of module {name}", tensors) for name, state in saved.items()}

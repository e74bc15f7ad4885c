"""What one rank writes into a checkpoint, and how its tensors are called there."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autopart.files.checkpoints.document import COMPANION, MASTER, OPTIMIZER
from autopart.ir.errors import CheckpointError
from autopart.session.session import Session
from autopart.state.companions import Companion
from autopart.state.optimizers import OptimizerPart, Optimizers, part_of
from autopart.state.shares import writers

_ALIGNED = 64
"""Bytes to whose multiples the copy of a tensor is aligned, as torch aligns its own."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors that a rank writes.

    weights: of the model, by original name, tied ones once.  more: "master/NAME", "optimizer/KEY/NAME" and
    "companion/COMPANION/NAME".  optimizer: what the optimizer of this rank holds, None without one.
    """

    weights: dict[str, torch.Tensor]
    more: dict[str, torch.Tensor]
    optimizer: OptimizerPart | None

    def copied(self, earlier: Contents | None = None) -> Contents:
        """Return the same with copies in host memory, which training does not change.

        earlier: copies that nobody reads any more; their memory is used again, since new memory costs more time than
        the copy into it."""
        own = [*self.weights.values(), *self.more.values()]
        old = [] if earlier is None else [*earlier.weights.values(), *earlier.more.values()]
        if [(each.shape, each.dtype) for each in old] != [(each.shape, each.dtype) for each in own]:
            old = _in_one_piece(own)
        copies = [target.copy_(tensor.detach()) for target, tensor in zip(old, own, strict=True)]
        weights = dict(zip(self.weights, copies, strict=False))
        return Contents(weights, dict(zip(self.more, copies[len(weights) :], strict=True)), self.optimizer)


def _in_one_piece(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensors like these in host memory, all in one allocation.

    It lives as long as the pipe.  Many small ones would take the memory between those that come and go in a step, which
    then find none of their size."""
    starts = [0, *itertools.accumulate(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)]
    memory = torch.empty(starts[-1], dtype=torch.uint8)
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]


def contents_of(
    session: Session,
    optimizers: Optimizers,
    companions: Mapping[str, Companion],
    placeholder: nn.Parameter,
) -> Contents:
    """Return what this rank writes, so that all ranks write each tensor once; the tensors are the live ones.  Local.

    placeholder: the parameter of a rank that has none.  Raises CheckpointError for what cannot be saved."""
    sizes = {name: tensor.nbytes for name, tensor in own_state(session).items()}
    writer = writers(sizes, session.standing.context.placement, updated_buffers(session), session.world.size)
    mine = [name for name in sizes if writer[name] == session.world.rank]
    return contents_with(session, mine, optimizers, companions, placeholder)


def contents_with(
    session: Session,
    mine: Collection[str],
    optimizers: Optimizers,
    companions: Mapping[str, Companion],
    placeholder: nn.Parameter,
) -> Contents:
    """Return these tensors of the model, and all that belongs to them, as `contents_of` does.  mine: names of
    parameters and buffers whose newest value this rank has."""
    session.tensors.masters.write()
    held, own, chosen = session.tensors.held, own_state(session), frozenset(mine)
    weights = {name: held.get(name, own[name]) for name in mine}
    more: dict[str, torch.Tensor] = {
        f"{MASTER}/{name}": t for name, t in session.tensors.masters.by_name.items() if name in chosen
    }
    part = part_of(optimizers, driven_names(session, placeholder)) if optimizers else None
    if part is not None:
        more |= {f"{OPTIMIZER}/{key}/{name}": t for (name, key), t in part.tensors.items() if name in chosen}
    for title, companion in companions.items():
        more |= {f"{COMPANION}/{title}/{name}": t for name, t in companion.tensors().items() if name in chosen}
    for name, tensor in {**weights, **more}.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name} cannot be saved",
                why="it is on the meta device" if tensor.is_meta else f"it is of layout {tensor.layout}",
                fix="make it a dense tensor with values",
            )
    return Contents(weights, more, part)


def updated_buffers(session: Session) -> frozenset[str]:
    """Return the buffers that change in training."""
    return frozenset(buffer for buffer, _ in session.graph.updates)


def own_state(session: Session) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of this rank's model, tied ones once under the first name that the
    plan uses.  What other ranks train has old values here."""
    captures = session.captures
    state = captures.trained.tensors()
    return tied_once({name: tensor for name, tensor in state.items() if captures.is_own(name, tensor)}, session.tied)


def tied_once(state: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return a state with one entry for tied tensors.  tied: first name of each tied tensor, by its other names."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        found.setdefault(tied.get(name, name), tensor)
    return found


def driven_names(session: Session, placeholder: nn.Parameter) -> dict[int, str]:
    """Return the names of the parameters that an optimizer of this rank updates, by identity; "" for the placeholder
    of a rank without parameters."""
    names = {id(t): name for name, t in session.tensors.driven.items() if isinstance(t, nn.Parameter)}
    for name, parameter in session.captures.trained.named_parameters():
        names.setdefault(id(parameter), name)  # one that no stage uses
    return names | {id(placeholder): ""}

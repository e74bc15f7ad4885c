"""What one rank writes into a checkpoint, and how its tensors are called there."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopart.files.checkpoints.document import COMPANION, MASTER, OPTIMIZER, OptimizerState, key_parts
from autopart.ir.errors import CheckpointError
from autopart.ir.shares import whole
from autopart.session.placement import Moving, Placement, move_pieces
from autopart.session.session import Session
from autopart.state.core import Core
from autopart.state.optimizers import Optimizers, state_of

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
    optimizer: OptimizerState | None

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


def contents_of(core: Core, optimizers: Optimizers) -> Contents:
    """Return what this rank writes, so that all ranks write each tensor once; the tensors are the live ones.  Local.

    Raises CheckpointError for what cannot be saved."""
    session = core.session
    cuts, held = session.standing.context.placement.cuts, session.tensors.held
    mine = [n for n, rank in _writers(session).items() if rank == session.world.rank or (n in cuts and n in held)]
    return contents_with(core, mine, optimizers)


def _writers(session: Session) -> dict[str, int]:
    """Return the rank that writes each tensor of the model, with everything that belongs to it, as all ranks know it:
    those that have its newest value share the work by bytes.

    Of a buffer that changes in training the owner's value counts.  A tensor that no stage uses is written by the rank
    with the least.  Longest processing time first (Graham 1969): no rank writes more than 4/3 of the best deal's.
    O(tensors * ranks of each).
    """
    placement, updated = session.standing.context.placement, updated_buffers(session)
    sizes = {name: tensor.nbytes for name, tensor in own_state(session).items()}
    load, found = [0] * session.world.size, dict[str, int]()
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        pieces = placement.pieces(name)
        owner = placement.owner(name) if name in updated else None
        ranks = [rank for piece in pieces for rank in placement.keepers.get(piece, ())] if owner is None else [owner]
        found[name] = min(ranks or range(len(load)), key=lambda rank: (load[rank], rank))
        load[found[name]] += sizes[name]
    return found


def joined_pieces(session: Session, contents: Contents) -> Contents:
    """Return contents with whole tensors in place of pieces, each on the rank that writes it.  Collective.

    Raises CheckpointError on all ranks for state that some rank lacks, or that is not cut like its parameter."""
    placement, world, held = session.standing.context.placement, session.world, session.tensors.held
    if not placement.cuts:
        return contents
    every, writer = {**contents.weights, **contents.more}, _writers(session)
    names = {key: key if key in contents.weights else key_parts(key)[2] for key in every}
    own = {key: tensor for key, tensor in every.items() if names[key] in placement.cuts and tensor.dim()}
    told = world.gather_objects({key: (names[key], held[names[key]].shape == t.shape) for key, t in own.items()})
    routes: list[Moving] = []
    for key, name in sorted({(key, name) for each in told for key, (name, _) in each.items()}):
        if not all(told[placement.owners[piece]].get(key, (name, False))[1] for piece in placement.pieces(name)):
            raise world.known(CheckpointError(f"{key} cannot be saved", why=f"it is not cut like {name} on every rank"))
        for piece in placement.pieces(name):
            routes.append(((replace(piece, name=key), whole(key)), placement.owners[piece], writer[name]))
    state, here = own_state(session), [key for key in own if writer[names[key]] == world.rank]
    made = {key: torch.empty(state[names[key]].shape, dtype=own[key].dtype) for key in here}
    move_pieces(world, routes, own, made)
    mine = {key: made.get(key, t) for key, t in every.items() if writer.get(names[key], world.rank) == world.rank}
    weights = {name: mine.pop(name) for name in contents.weights if name in mine}
    return replace(contents, weights=weights, more=mine)


def contents_with(core: Core, mine: Collection[str], optimizers: Optimizers) -> Contents:
    """Return these tensors of the model, and all that belongs to them, as `contents_of` does.  mine: names of
    parameters and buffers whose newest value this rank has."""
    session = core.running
    assert session is not None
    session.tensors.masters.write()
    held, own, chosen = session.tensors.held, own_state(session), frozenset(mine)
    weights = {name: held.get(name, own[name]) for name in mine}
    more: dict[str, torch.Tensor] = {
        f"{MASTER}/{name}": t for name, t in session.tensors.masters.by_name.items() if name in chosen
    }
    state = None
    if optimizers:
        state, tensors = state_of(optimizers, driven_names(core))
        more |= {f"{OPTIMIZER}/{key}/{name}": t for (name, key), t in tensors.items() if name in chosen}
    for title, companion in core.companions.items():
        more |= {f"{COMPANION}/{title}/{name}": t for name, t in companion.tensors().items() if name in chosen}
    for name, tensor in {**weights, **more}.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{name} cannot be saved",
                why="it is on the meta device" if tensor.is_meta else f"it is of layout {tensor.layout}",
                fix="make it a dense tensor with values",
            )
    return Contents(weights, more, state)


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


def driven_names(core: Core) -> dict[int, str]:
    """Return the names of the parameters that an optimizer of this rank updates, by identity; "" for the placeholder
    of a rank without parameters."""
    session = core.running
    assert session is not None
    names = {id(t): name for name, t in session.tensors.driven.items() if isinstance(t, nn.Parameter)}
    for name, parameter in session.captures.trained.named_parameters():
        names.setdefault(id(parameter), name)  # one that no stage uses
    return names | {id(core.placeholder): ""}


def by_keepers(names: Iterable[str], placement: Placement, updated: frozenset[str]) -> dict[tuple[int, ...], list[str]]:
    """Return the names of tensors by the ranks that have the newest value; () stands for all ranks, which have what no
    stage uses.

    updated: buffers that change in training: all replicas take the value of their owner at the end of a step."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        ranks = (placement.holders if name in updated else placement.keepers).get(whole(name), ())
        found.setdefault(ranks, []).append(name)
    return dict(sorted(found.items()))

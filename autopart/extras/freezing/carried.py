"""The state of an optimizer and of companions, moved directly to the ranks that keep the parameters under another plan,
and how long all that moves takes on these machines.

The optimizer stays the same object: its parameter groups get the parameters that this rank keeps now, and a scheduler
that drives it goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopart.files.checkpoints.document import OptimizerState
from autopart.ir.errors import CheckpointError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.shares import Piece, overlap, whole
from autopart.runtime.group.world import World
from autopart.runtime.messages.moves import move_tensors
from autopart.session.executors.context import RankContext
from autopart.session.placement import Moving, Placement, move_pieces, routes
from autopart.session.ranks.agreement import together
from autopart.session.session import Session
from autopart.state.contents import driven_names
from autopart.state.core import Core
from autopart.state.optimizers import Key, Optimizers, give_state, groups_with, joined, state_of

_MOVING = "moving the optimizer's state to another plan"


def carrying(core: Core, optimizers: Optimizers) -> Callable[[RankContext], None]:
    """Check this rank's optimizers, and return what moves its state once the ranks hold what another plan gives them.

    Collective, and so is what is returned.  Raises UsageError on all ranks, before anything is changed, for state that
    has no name or is not cut like its parameter, and for optimizers that differ between ranks.  Bytes sent: of the
    state of the parameters that move, each piece from one rank to the ranks that keep some of it now."""
    session = core.session
    world = session.world
    if not any(world.reduce_numbers([float(bool(optimizers))])):
        return lambda _: None
    with together(world, _MOVING):
        names = driven_names(core)
        try:
            state, tensors = state_of(optimizers, names)
        except CheckpointError as error:
            raise _not_carried(error) from error
    kinds = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
    told = world.gather_objects((state, kinds))
    try:
        whole_state = joined([each for each, _ in told])
    except CheckpointError as error:
        raise world.known(_not_carried(error)) from error
    assert whole_state is not None
    shapes = {name: tuple(p.shape) for name, p in session.captures.trained.named_parameters()}
    moving = _StateInPieces(session.standing.context.placement, shapes, [own for _, own in told])
    moving.require_cut(world, session.standing.context.placement)

    def moved(context: RankContext) -> None:
        moving.require_cut(world, context.placement)
        here = tensors | moving.move(context, tensors)
        _give(optimizers, whole_state, here, _kept(session, context, optimizers, names), core.placeholder)

    return moved


class _StateInPieces:
    """The optimizer state of all ranks: which rank has which piece of it.

    placement: of the present plan.  shapes: of whole parameters.  told: what each rank has, without values."""

    def __init__(
        self, placement: Placement, shapes: Mapping[str, tuple[int, ...]], told: Sequence[Mapping[Key, torch.Tensor]]
    ) -> None:
        self._shapes = shapes
        self._kinds: dict[Key, torch.Tensor] = {}
        self._having: dict[Piece, list[int]] = {}
        self._sizes: dict[Piece, int] = {}
        self._unlike: set[Key] = set()
        for rank, own in enumerate(told):
            for key, kind in own.items():
                piece = placement.piece(rank, key[0]) if kind.dim() else whole(key[0])
                self._kinds.setdefault(key, kind)
                self._having.setdefault(_of_state(key, piece), []).append(rank)
                self._sizes.setdefault(_of_state(key, piece), kind.nbytes)
                if kind.dim() and tuple(kind.shape) != self._shape(key, piece):
                    self._unlike.add(key)
        for key, kind in self._kinds.items():
            if kind.dim() and any(_of_state(key, piece) not in self._having for piece in placement.pieces(key[0])):
                self._unlike.add(key)

    def _shape(self, key: Key, piece: Piece) -> tuple[int, ...]:
        """Return the shape of the state of a piece that is cut like it."""
        found = self._shapes.get(key[0], tuple(self._kinds[key].shape))
        return tuple(size // (piece.parts if axis == piece.axis else 1) for axis, size in enumerate(found))

    def require_cut(self, world: World, placement: Placement) -> None:
        """Raise UsageError, on all ranks alike, for state of a parameter in pieces that is not cut like it."""
        for name, key in sorted(self._unlike):
            if name in placement.cuts:
                fix = "use an optimizer whose state is of the shape of each parameter, or a plan that does not cut it"
                what = (
                    f"the state {key!r} of {name} cannot move: {name} is held in pieces, and its state is not cut alike"
                )
                raise world.known(UsageError(what, fix=fix))

    def move(self, context: RankContext, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return what this rank keeps now of which it had another piece, or nothing.  Collective.

        context: of the other plan.  tensors: the state that this rank has."""
        placement, world = context.placement, context.world
        wanting: dict[Piece, tuple[int, ...]] = {}
        for key, kind in self._kinds.items():
            for piece in placement.pieces(key[0]):
                wanted = _of_state(key, piece if kind.dim() else whole(key[0]))
                wanting[wanted] = wanting.get(wanted, ()) + placement.keepers.get(piece, ())
        found = spread(self._having, wanting, self._sizes)
        mine = {piece.name for (_, piece), _, target in found if target == world.rank}
        made: dict[Key, torch.Tensor] = {}
        for key, kind in self._kinds.items():
            if _joined(key) in mine:
                alike = kind.dim() and key not in self._unlike
                shape = self._shape(key, placement.piece(world.rank, key[0])) if alike else kind.shape
                made[key] = torch.empty(shape, dtype=kind.dtype, device="cpu" if key[1] == "step" else world.device)
        before, after = ({_joined(key): each for key, each in of.items()} for of in (tensors, made))
        move_pieces(world, found, before, after)
        return made


def spread(
    having: Mapping[Piece, Sequence[int]], wanting: Mapping[Piece, Sequence[int]], sizes: Mapping[Piece, int]
) -> list[Moving]:
    """Return routes to every rank that wants a piece and lacks it, from every piece that has some of it: from the rank
    itself, else from the one that sends fewest bytes until then among those that have it.

    sizes: of the pieces that ranks have, in bytes.  O(routes * ranks that have a piece)."""
    sources: dict[str, list[Piece]] = {}
    for piece in having:
        sources.setdefault(piece.name, []).append(piece)
    found: list[Moving] = []
    sent: Counter[int] = Counter()
    for piece, targets in wanting.items():
        for target in targets if piece.name in sources else ():
            for source in sources[piece.name] if target not in having.get(piece, ()) else ():
                share, ranks = overlap(source, piece), having[source]
                if share and target in ranks:
                    found.append(((source, piece), target, target))
                elif share:
                    rank = min(ranks, key=lambda rank: (sent[rank], rank))
                    sent[rank] += int(sizes[source] * source.parts * share)
                    found.append(((source, piece), rank, target))
    return found


def _joined(key: Key) -> str:
    return "\0".join(key)


def _of_state(key: Key, piece: Piece) -> Piece:
    """Return the piece of a part of the optimizer's state that belongs to a piece of its parameter."""
    return replace(piece, name=_joined(key))


def _kept(
    session: Session, context: RankContext, optimizers: Optimizers, names: Mapping[int, str]
) -> dict[str, nn.Parameter]:
    """Return the parameters that this rank's optimizers may update now, by name: those that it keeps, and, of what it
    has, those that no stage uses."""
    rank, placement = session.world.rank, context.placement
    kept = {name: t for name, t in context.tensors.driven.items() if placement.keeps(rank, name)}
    unused = {
        name: parameter
        for _, group in groups_with(optimizers)
        for parameter in group["params"]
        if (name := names[id(parameter)]) and placement.owner(name) is None
    }
    return {name: tensor for name, tensor in {**unused, **kept}.items() if isinstance(tensor, nn.Parameter)}


def _give(
    optimizers: Optimizers,
    whole: OptimizerState,
    tensors: Mapping[Key, torch.Tensor],
    kept: Mapping[str, nn.Parameter],
    placeholder: nn.Parameter,
) -> None:
    """Put the parameters that this rank keeps now into the groups of the optimizers, with their state.  Local."""
    groups = [group for _, group in groups_with(optimizers)]
    for group, saved in zip(groups, whole.groups, strict=True):
        own = [name for name in saved.names if name in kept]
        group["params"] = [kept[name] for name in own]
        if "param_names" in group:
            group["param_names"] = own
    if not any(group["params"] for group in groups):
        groups[0]["params"] = [placeholder]
        if "param_names" in groups[0]:
            groups[0]["param_names"] = [""]
    for optimizer in optimizers:
        optimizer.state.clear()
    names = {id(parameter): name for name, parameter in kept.items()} | {id(placeholder): ""}
    give_state(optimizers, names, [{}] * len(groups), whole, tensors, {})


def _not_carried(error: CheckpointError) -> UsageError:
    why = error.why or error.what
    return UsageError("the state of the optimizer cannot move to another plan", why=why, fix=error.fix)


Pairs = Mapping[tuple[int, int], int]
"""Bytes by sending and receiving rank."""
PROBE_SHARE, LEAST_PROBE, MOST_PROBE = 0.05, 1 << 20, 32 << 20
"""Part of what moves that is sent on trial, and its limits in bytes for each pair of ranks."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """The bytes that a rank keeps besides the tensors of the model, by parameter.

    state: of the optimizer.  beside: of the master weight and the gradient, of parameters that the rank owns.
    """

    state: Mapping[str, int]
    beside: Mapping[str, int]


def moved_bytes(graph: Graph, old: Placement, new: Placement, kept: Sequence[KeptBytes]) -> dict[tuple[int, int], int]:
    """Return the bytes that move when `new` follows `old`, by the pair of ranks.

    kept: by each rank.  Tensors, masters and gradients come from the rank that owns them (`placement.relocate`), the
    optimizer's state from any that has it (`spread`).  O(parameters * ranks)."""
    sizes = {param.name: param.size_bytes for param in graph.params}
    beside = {name: size for own in kept for name, size in own.beside.items()}
    pairs: Counter[tuple[int, int]] = Counter()
    for (piece, needed), source, target in routes(old.owners, old.holders, new.holders):
        pairs[source, target] += int(sizes.get(piece.name, 0) * overlap(piece, needed))
    for (piece, needed), source, target in routes(old.owners, old.keepers, new.keepers):
        pairs[source, target] += int(beside.get(piece.name, 0) * piece.parts * overlap(piece, needed))
    having: dict[Piece, list[int]] = {}
    state: dict[Piece, int] = {}
    for rank, own in enumerate(kept):
        for name, size in own.state.items():
            having.setdefault(old.piece(rank, name), []).append(rank)
            state.setdefault(old.piece(rank, name), size)
    names = dict.fromkeys(piece.name for piece in having)
    wanting = {piece: new.keepers.get(piece, ()) for name in names for piece in new.pieces(name)}
    for (piece, needed), source, target in spread(having, wanting, state):
        pairs[source, target] += int(state[piece] * piece.parts * overlap(piece, needed))
    return dict(pairs)


def predicted_s(world: World, pairs: Pairs) -> float:
    """Return the seconds that moving these bytes will take, from sending a part of them.  Collective; equal on all
    ranks.  Takes about a twentieth of that time, and memory for `MOST_PROBE` bytes for each pair of a rank."""
    moving = {pair: size for pair, size in sorted(pairs.items()) if size and pair[0] != pair[1]}
    if not moving or world.size == 1:
        return 0.0
    largest = max(moving.values())
    part = min(1.0, max(PROBE_SHARE, LEAST_PROBE / largest), MOST_PROBE / largest)
    probes = {
        f"{source}>{target}": torch.zeros(max(1, int(size * part)), dtype=torch.uint8)
        for (source, target), size in moving.items()
        if world.rank in (source, target)
    }
    probed = [(f"{source}>{target}", source, target) for source, target in moving]
    world.gather_numbers([0.0])  # all begin at once
    began = time.perf_counter()
    move_tensors(world, probed, probes)
    taken = max(row[0] for row in world.gather_numbers([time.perf_counter() - began]))
    return taken / part

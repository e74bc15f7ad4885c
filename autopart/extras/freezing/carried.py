"""The state of an optimizer and of companions, moved directly to the ranks that keep the parameters under another plan,
and how long all that moves takes on these machines.

The optimizer stays the same object: its parameter groups get the parameters that this rank keeps now, and a scheduler
that drives it goes on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from autopart.files.checkpoints.document import OptimizerState
from autopart.ir.errors import CheckpointError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.shares import overlap, whole
from autopart.runtime.group.world import World
from autopart.runtime.messages.moves import move_tensors
from autopart.session.executors.context import RankContext
from autopart.session.placement import Placement, routes
from autopart.session.ranks.agreement import together
from autopart.session.session import Session
from autopart.state.contents import driven_names
from autopart.state.core import Core
from autopart.state.optimizers import Key, Optimizers, give_state, groups_with, joined, state_of

_MOVING = "moving the optimizer's state to another plan"
T = TypeVar("T")


def carrying(core: Core, optimizers: Optimizers) -> Callable[[RankContext], None]:
    """Check this rank's optimizers, and return what moves its state once the ranks hold what another plan gives them.

    Collective, and so is what is returned.  Raises UsageError on all ranks, before anything is changed, for state that
    has no name, and for optimizers that differ between ranks.  Bytes sent: of the state of the parameters that move,
    each from one rank to the ranks that keep it now."""
    session = core.session
    world = session.world
    if not any(world.reduce_numbers([float(bool(optimizers))])):
        return lambda _: None
    require_whole(session.standing.context)
    with together(world, _MOVING):
        names = driven_names(core)
        try:
            state, tensors = state_of(optimizers, names)
        except CheckpointError as error:
            raise _not_carried(error) from error
    kinds = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}
    told = world.gather_objects((state, kinds))
    try:
        whole = joined([each for each, _ in told])
    except CheckpointError as error:
        raise world.known(_not_carried(error)) from error
    assert whole is not None
    where: dict[Key, torch.Tensor] = {}
    having: dict[Key, list[int]] = {}
    for rank, (_, own) in enumerate(told):
        for key, kind in own.items():
            where.setdefault(key, kind)
            having.setdefault(key, []).append(rank)

    def moved(context: RankContext) -> None:
        require_whole(context)
        wanting = {piece.name: ranks for piece, ranks in context.placement.keepers.items()}
        arriving = {
            key: torch.empty_like(kind, device="cpu" if key[1] == "step" else world.device)
            for key, kind in where.items()
            if world.rank in wanting.get(key[0], ()) and world.rank not in having[key]
        }
        sizes = {key: kind.nbytes for key, kind in where.items()}
        found = spread(having, {key: wanting.get(key[0], ()) for key in where}, sizes)
        routes = [(_joined(key), source, target) for key, source, target in found]
        here = tensors | arriving
        move_tensors(world, routes, {_joined(key): tensor for key, tensor in here.items()})
        _give(optimizers, whole, here, _kept(session, context, optimizers, names), core.placeholder)

    return moved


def require_whole(context: RankContext) -> None:
    """Raise UsageError, on all ranks alike, if the ranks hold a parameter in pieces."""
    for name in context.placement.cuts:
        fix = "pipe.save(folder, optimizer), close the pipe, compile the other plan and pipe.load(folder, optimizer)"
        raise context.world.known(UsageError(f"{name} is held in pieces, whose optimizer state cannot move", fix=fix))


def spread(
    having: Mapping[T, Sequence[int]], wanting: Mapping[T, Sequence[int]], sizes: Mapping[T, int]
) -> list[tuple[T, int, int]]:
    """Return routes to every rank that wants a tensor and lacks it, from the one that sends fewest bytes until then
    among those that have it.  O(routes * ranks that have a tensor)."""
    routes: list[tuple[T, int, int]] = []
    sent: Counter[int] = Counter()
    for key, sources in having.items():
        for target in wanting[key]:
            if target not in sources:
                source = min(sources, key=lambda rank: (sent[rank], rank))
                sent[source] += sizes[key]
                routes.append((key, source, target))
    return routes


def _joined(key: Key) -> str:
    return "\0".join(key)


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
    having: dict[str, list[int]] = {}
    state: dict[str, int] = {}
    for rank, own in enumerate(kept):
        for name, size in own.state.items():
            having.setdefault(name, []).append(rank)
            state.setdefault(name, size)
    for name, source, target in spread(having, {name: new.keepers.get(whole(name), ()) for name in having}, state):
        pairs[source, target] += state[name]
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

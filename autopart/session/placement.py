"""The ranks that hold each tensor of the model under a plan, and how tensors move when the plan changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Stage
from autopart.ir.shares import Piece, cut, overlap, owners_of, whole
from autopart.passes.program.routing import homes, tied
from autopart.passes.shards.choice import Held, pieces_of
from autopart.passes.shards.states import cut as cut_state
from autopart.runtime.activity import set_activity
from autopart.runtime.group.world import World
from autopart.runtime.messages.moves import Route, move_tensors
from autopart.runtime.sums.shared_values import Sharing
from autopart.runtime.tensors import LocalTensors, common
from autopart.session.lists import SHARDINGS

Ranks = Mapping[Piece, tuple[int, ...]]
Moving = Route[tuple[Piece, Piece]]
"""What two pieces have in common, from the rank that has the first to one that needs the second."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of each piece of a parameter or buffer.

    holders: ranks that hold it, ascending.  keepers: those that keep its gradient and optimizer state: all holders, or
    with zero=1 one of each stage.  owners: the rank whose value counts: of the first stage that uses a parameter, or of
    the stage that updates a buffer.  cuts: the pieces of each tensor that no rank holds whole.  sharing: how ranks
    that hold the same share the optimizer state, in the order of stages; of each, whole tensors first.  tied: the
    stages of each trainable parameter that several stages hold.
    """

    holders: Ranks = field(default_factory=dict)
    keepers: Ranks = field(default_factory=dict)
    owners: Mapping[Piece, int] = field(default_factory=dict)
    cuts: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    sharing: tuple[Sharing, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Return the pieces of a tensor."""
        return self.cuts.get(name) or (whole(name),)

    @property
    def held(self) -> Held:
        """How the ranks of a shard group divide parameters."""
        firsts = (pieces[0] for pieces in self.cuts.values())
        return tuple((first.name, cut_state(first.axis, first.blocks)) for first in firsts)

    def piece(self, rank: int, name: str) -> Piece:
        """Return what a rank holds of a tensor, if it holds anything of it."""
        pieces = self.cuts.get(name)
        return next((p for p in pieces if rank in self.holders[p]), pieces[0]) if pieces else whole(name)

    def with_unused(self, earlier: Placement) -> Placement:
        """Return this placement with the tensors that only an earlier one has, where they were: their values may have
        been trained, and a later plan may use them again, as that of another adapter does."""
        own = {piece.name for piece in self.owners}
        unused = [piece for piece in earlier.owners if piece.name not in own]
        return replace(
            self,
            holders={**{p: earlier.holders[p] for p in unused}, **self.holders},
            keepers={**{p: earlier.keepers[p] for p in unused if p in earlier.keepers}, **self.keepers},
            owners={**{p: earlier.owners[p] for p in unused}, **self.owners},
            cuts={**{p.name: earlier.cuts[p.name] for p in unused if p.name in earlier.cuts}, **self.cuts},
        )

    def keeps(self, rank: int, name: str) -> bool:
        """Return whether a rank that holds this tensor keeps its gradient and optimizer state."""
        return rank in self.keepers.get(self.piece(rank, name), (rank,))

    def owned_by(self, rank: int) -> dict[str, Piece]:
        """Return the pieces that a rank owns, by name."""
        return {piece.name: piece for piece, owner in self.owners.items() if owner == rank}

    def owner(self, name: str) -> int | None:
        """Return the rank that owns a tensor, or its first piece; None if no stage uses it."""
        return self.owners.get(self.pieces(name)[0])

    def owned(self, names: Iterable[str]) -> dict[Piece, int]:
        """Return the owner of each piece of these tensors: rank 0 for one that no stage uses."""
        return {piece: self.owners.get(piece, 0) for name in names for piece in self.pieces(name)}


def placement_of(graph: Graph, decision: Decision, divided: Held | None = None) -> Placement:
    """Return where a plan puts the parameters and buffers of its graph; constants are part of the stage's code.

    divided: what its ranks divide, if it was made for another graph of the model.

    A parameter of several stages has a copy with an owner in each: equal gradients and equal optimizers keep the copies
    equal.  Raises PlanError (`_check_shared`).  O(ops + parameters * log(parameters)).
    """
    _check_shared(graph, decision)
    ops = graph.op_map()
    constants = {param.name for param in graph.params if param.kind == "constant"}
    trained = {param.name: param.size_bytes for param in graph.params if param.trainable}
    holders: dict[Piece, set[int]] = {}
    keepers: dict[Piece, set[int]] = {}
    owners: dict[Piece, int] = {}
    cuts: dict[str, tuple[Piece, ...]] = {}
    sharing: list[Sharing] = []
    unused = homes(decision, graph)
    for number, stage in enumerate(decision.stages):
        used = dict.fromkeys(name for op in stage.ops for name in ops[op].params if name not in constants)
        used.update(dict.fromkeys(name for name, home in unused.items() if home == number))
        parts = _parts_of(graph, stage, used, divided)
        shared = {name: parts.get(name, (whole(name),)) for name in used if name in trained}
        dealt = _dealt(stage, shared, trained, keepers) if decision.zero else {}
        sharing += _shared(number, stage, dealt, decision.bucket_bytes)
        for name in used:
            pieces = parts.get(name, (whole(name),))
            several = len(pieces) > 1 and pieces[0] in holders and decision.shards == 1
            if cuts.setdefault(name, pieces) != pieces or several:
                raise PlanError(f"{name} is cut into pieces, and several stages use it", fix="put them into one stage")
            holding = [stage.ranks[place :: len(pieces)] for place in range(len(pieces))]
            for piece, ranks in zip(pieces, holding, strict=True):
                keeping = (dealt[piece],) if piece in dealt else ranks
                owners.setdefault(piece, keeping[0])
                holders.setdefault(piece, set()).update(ranks)
                keepers.setdefault(piece, set()).update(keeping)
    writer = graph.writer()
    for buffer, value in graph.updates:
        stage = next(s for s in decision.stages if writer[value] in s.ops)
        owners[whole(buffer)] = stage.ranks[0]
        holders.setdefault(whole(buffer), set()).update(stage.ranks)
    for name in graph.before:
        owners.setdefault(whole(name), decision.stages[0].ranks[0])
        for of in (holders, keepers):
            of.setdefault(whole(name), set()).update(decision.stages[0].ranks)
    held, kept = ({piece: tuple(sorted(ranks)) for piece, ranks in of.items()} for of in (holders, keepers))
    cuts = {name: pieces for name, pieces in cuts.items() if len(pieces) > 1}
    for name, pieces in cuts.items():
        if sum(len(held[piece]) for piece in pieces) > len({rank for piece in pieces for rank in held[piece]}):
            why = "each rank holds one, so that stages on the same ranks list them in one order"
            raise PlanError(f"a rank would hold two pieces of {name}", why=why)
    return Placement(held, kept, owners, cuts, tuple(sharing), dict(tied(decision, graph)))


def _parts_of(graph: Graph, stage: Stage, used: Collection[str], held: Held | None) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each parameter that the ranks of a stage divide."""
    axes = {name: axis for each in SHARDINGS for name, axis in each.axes(graph, stage).items() if name in used}
    found = {name: cut(name, axis, len(stage.ranks)) for name, axis in axes.items()}
    divided = () if stage.shards == 1 else pieces_of(graph, stage.shards).items() if held is None else held
    for name, state in divided:
        if name in used:
            found[name] = cut(name, state.axis, stage.shards, state.before)
    return found


def _check_shared(graph: Graph, decision: Decision) -> None:
    """Raise PlanError if replicas of two stages that use one parameter are partly the same ranks and share optimizer
    state: some of them would gather its new value twice."""
    for name, users in tied(decision, graph) if decision.zero else ():
        groups = {frozenset(decision.stages[s].ranks) for s in users if len(decision.stages[s].ranks) > 1}
        crossing = next(((a, b) for a, b in combinations(groups, 2) if a & b), None)
        if crossing is not None:
            first, second = sorted(map(sorted, crossing))
            raise PlanError(
                f"parameter {name} is used by stages on ranks {first} and on ranks {second}",
                why="these share some ranks, not all: with zero=1 its new values would be gathered twice there",
                fix="put the stages on the same ranks or on different ones, or set zero to 0",
            )


def _dealt(
    stage: Stage,
    pieces: Mapping[str, Sequence[Piece]],
    sizes: Mapping[str, int],
    keepers: Mapping[Piece, Collection[int]],
) -> dict[Piece, int]:
    """Return the rank of a stage that keeps the optimizer state of each piece; empty without replicas.

    Parameters are dealt to replicas by what one of their ranks holds (`owners_of`).  Each rank of that replica keeps
    its piece of one that is cut, and one of them the whole ones: so none keeps more than `largest_share`.  sizes: of
    whole parameters, in bytes.  keepers: of earlier stages.  One that runs this stage too keeps the parameter here as
    well: a rank holds it once.
    """
    if stage.replicas < 2:
        return {}
    mine = {name: own for name, own in pieces.items() if len(own) in (1, stage.shards)}  # others lie on one rank each
    every = [piece for own in mine.values() for piece in own]
    kept = {piece: min(own) for piece in every if (own := set(keepers.get(piece, ())).intersection(stage.ranks))}
    held = {name: sizes[name] // len(own) for name, own in mine.items() if own[0] not in kept}
    replica = owners_of(held, stage.replicas)
    undivided: list[dict[str, int]] = [{} for _ in range(stage.replicas)]
    for name, number in replica.items():
        if mine[name][0].is_whole:
            undivided[number][name] = held[name]
    place = {name: at for own in undivided for name, at in owners_of(own, stage.shards).items()}

    def rank(piece: Piece) -> int:
        return stage.ranks[replica[piece.name] * stage.shards + place.get(piece.name, piece.index)]

    return {piece: kept[piece] if piece in kept else rank(piece) for piece in every}


def _shared(number: int, stage: Stage, dealt: Mapping[Piece, int], bucket_bytes: int) -> Iterator[Sharing]:
    """Yield how the ranks of a stage share the optimizer state: of whole tensors all of them, of pieces those that hold
    the same ones.  dealt: the owner of each piece, in the order in which the forward reads them."""
    owners: dict[tuple[int, int], dict[str, int]] = {}
    for piece, owner in dealt.items():
        owners.setdefault((piece.parts, piece.index), {})[piece.name] = owner
    for (parts, index), own in sorted(owners.items()):
        yield Sharing(number, stage.ranks[index::parts], own, bucket_bytes, parts > 1)


def relocate(world: World, old: Placement, new: Placement, before: LocalTensors, after: LocalTensors) -> None:
    """Move tensors from their owners under `old` to the ranks that need them under `new`.  Collective.

    before, after: what this rank holds, with the newest values.  Master weights and gradients go to keepers alone.  A
    tensor that no rank held before is not moved: no step has changed it.
    """
    set_activity("moving the weights to another plan")
    move_pieces(world, list(routes(old.owners, old.holders, new.holders)), before.held, after.held)
    kept = list(routes(old.owners, old.keepers, new.keepers))
    own = old.owned_by(world.rank)

    moving = _existing(world, kept, [piece for name, piece in own.items() if name in before.masters.by_name])
    for (_, piece), _, target in moving:
        if target == world.rank and piece.name not in after.masters.by_name:
            after.hold_master(piece.name)
    move_pieces(world, moving, before.masters.by_name, after.masters.by_name)
    after.masters.write()

    was, now = before.driven, after.driven
    sent = {name: grad for name, tensor in was.items() if name in own and (grad := tensor.grad) is not None}
    moving = _existing(world, kept, [own[name] for name in sent])
    received = {p.name: torch.zeros_like(now[p.name]) for (_, p), _, target in moving if target == world.rank}
    move_pieces(world, moving, sent, received)
    for (_, piece), _, target in kept:
        if target == world.rank:
            now[piece.name].grad = received.get(piece.name)
    for name, tensor in was.items():
        if tensor is not now.get(name) or not new.keeps(world.rank, name):
            tensor.grad = None


def routes(owners: Mapping[Piece, int], before: Ranks, after: Ranks) -> Iterator[Moving]:
    """Yield routes from the owners of each tensor's pieces to every rank that needs a piece, and did not before."""
    sources: dict[str, list[Piece]] = {}
    for piece in owners:
        sources.setdefault(piece.name, []).append(piece)
    for piece in sorted(after):
        for rank in after[piece]:
            for source in sources.get(piece.name, ()) if rank not in before.get(piece, ()) else ():
                if overlap(source, piece):
                    yield (source, piece), owners[source], rank


def move_pieces(
    world: World, routes: Sequence[Moving], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> None:
    """Copy along routes, from what this rank had before into what it has after, by name.  Collective."""
    ends: dict[tuple[Piece, Piece], torch.Tensor] = {}
    for (old, new), source, target in routes:
        if world.rank == target:
            ends[old, new] = common(after[new.name], new, old)
        if world.rank == source and source != target:
            ends[old, new] = common(before[old.name], old, new)
        elif world.rank == source:
            with torch.no_grad():
                ends[old, new].copy_(common(before[old.name], old, new))
    move_tensors(world, routes, ends)


def _existing(world: World, routes: list[Moving], mine: Collection[Piece]) -> list[Moving]:
    """Return the routes of pieces that exist on their owner.  mine: those of this rank.  Collective."""
    present = set[Piece]().union(*world.gather_objects(list(mine)))
    return [route for route in routes if route[0][0] in present]


def rank_label(decision: Decision, rank: int) -> str:
    """Return what a rank is called in errors: its stages, and the ranks that compute with it."""
    stages = decision.stages_of_rank(rank)
    if not stages:
        return "idle"
    group = decision.stages[stages[0]].shard_group(rank)
    together = f", ranks {', '.join(map(str, group))} together" if len(group) > 1 else ""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}{together}"

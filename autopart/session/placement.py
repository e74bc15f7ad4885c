"""The ranks that hold each tensor of the model under a plan, and how tensors move when the plan changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision, Stage
from autopart.ir.shares import owners_of
from autopart.passes.program.routing import homes, tied
from autopart.runtime.group.world import World
from autopart.runtime.messages.moves import Route, move_tensors
from autopart.runtime.sums.shared_values import Sharing
from autopart.runtime.tensors import LocalTensors

Ranks = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of each parameter and buffer.

    holders: ranks that hold it, ascending.  keepers: those that keep its gradient and optimizer state: all holders, or
    with zero=1 one of each stage.  owners: the rank whose value counts: of the first stage that uses a parameter, or of
    the stage that updates a buffer.  sharing: how the replicas of each stage share the optimizer state.  tied: the
    stages of each trainable parameter that several stages hold.
    """

    holders: Ranks = field(default_factory=dict)
    keepers: Ranks = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)
    sharing: tuple[Sharing, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def sharing_stages(self) -> tuple[int, ...]:
        """The stages whose replicas share the optimizer state."""
        return tuple(number for number, stage in enumerate(self.sharing) if stage.owners)

    def with_unused(self, earlier: Placement) -> Placement:
        """Return this placement with the tensors that only an earlier one has, where they were: their values may have
        been trained, and a later plan may use them again, as that of another adapter does."""
        return replace(
            self,
            holders={**earlier.holders, **self.holders},
            keepers={**earlier.keepers, **self.keepers},
            owners={**earlier.owners, **self.owners},
        )

    def keeps(self, rank: int, name: str) -> bool:
        """Return whether a rank that holds this tensor keeps its gradient and optimizer state."""
        return name not in self.keepers or rank in self.keepers[name]


def placement_of(graph: Graph, decision: Decision) -> Placement:
    """Return where a plan puts the parameters and buffers of its graph; constants are part of the stage's code.

    A parameter of several stages has a copy with an owner in each: equal gradients and equal optimizers keep the copies
    equal.  Raises PlanError (`_check_shared`).  O(ops + parameters * log(parameters)).
    """
    _check_shared(graph, decision)
    ops = graph.op_map()
    constants = {param.name for param in graph.params if param.kind == "constant"}
    trained = {param.name: param.size_bytes for param in graph.params if param.trainable}
    holders: dict[str, set[int]] = {}
    keepers: dict[str, set[int]] = {}
    owners: dict[str, int] = {}
    sharing = []
    unused = homes(decision, graph)
    for number, stage in enumerate(decision.stages):
        used = dict.fromkeys(name for op in stage.ops for name in ops[op].params if name not in constants)
        used.update(dict.fromkeys(name for name, home in unused.items() if home == number))
        dealt = _dealt(stage, [name for name in used if name in trained], trained, keepers) if decision.zero else {}
        keeping = {name: (dealt[name],) if name in dealt else stage.ranks for name in used}
        sharing.append(Sharing(stage.ranks, dealt, decision.bucket_bytes))
        for name in used:
            owners.setdefault(name, keeping[name][0])
            holders.setdefault(name, set()).update(stage.ranks)
            keepers.setdefault(name, set()).update(keeping[name])
    writer = graph.writer()
    for buffer, value in graph.updates:
        stage = next(s for s in decision.stages if writer[value] in s.ops)
        owners[buffer] = stage.ranks[0]
        holders.setdefault(buffer, set()).update(stage.ranks)
    for name in graph.before:
        owners.setdefault(name, decision.stages[0].ranks[0])
        for of in (holders, keepers):
            of.setdefault(name, set()).update(decision.stages[0].ranks)
    held, kept = ({name: tuple(sorted(ranks)) for name, ranks in of.items()} for of in (holders, keepers))
    return Placement(held, kept, owners, tuple(sharing), dict(tied(decision, graph)))


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
    stage: Stage, names: Sequence[str], sizes: Mapping[str, int], keepers: Mapping[str, Collection[int]]
) -> dict[str, int]:
    """Return the rank of a stage that keeps the optimizer state of each parameter; empty without replicas.

    keepers: of earlier stages.  One that runs this stage too keeps the parameter here as well: a rank holds it once.
    """
    if len(stage.ranks) < 2:
        return {}
    kept = {name: min(own) for name in names if (own := set(keepers.get(name, ())).intersection(stage.ranks))}
    fresh = owners_of({name: sizes[name] for name in names if name not in kept}, len(stage.ranks))
    return {name: kept[name] if name in kept else stage.ranks[fresh[name]] for name in names}


def relocate(world: World, old: Placement, new: Placement, before: LocalTensors, after: LocalTensors) -> None:
    """Move tensors from their owners under `old` to the ranks that need them under `new`.  Collective.

    before, after: what this rank holds, with the newest values.  Master weights and gradients go to keepers alone.  A
    tensor that no rank held before is not moved: no step has changed it.
    """
    move_tensors(world, list(routes(old.owners, old.holders, new.holders)), {**after.held, **before.held})
    kept = list(routes(old.owners, old.keepers, new.keepers))
    own = {name for name, rank in old.owners.items() if rank == world.rank}

    moving = _existing(world, kept, own & before.masters.by_name.keys())
    for name, _, target in moving:
        if target == world.rank and name not in after.masters.by_name:
            after.hold_master(name)
    move_tensors(world, moving, {**after.masters.by_name, **before.masters.by_name})
    after.masters.write()

    was, now = before.driven, after.driven
    sent = {name: grad for name, tensor in was.items() if name in own and (grad := tensor.grad) is not None}
    moving = _existing(world, kept, sent)
    received = {name: torch.zeros_like(now[name]) for name, _, target in moving if target == world.rank}
    move_tensors(world, moving, {**sent, **received})
    for name, _, target in kept:
        if target == world.rank:
            now[name].grad = received.get(name)
    for name, tensor in was.items():
        if tensor is not now.get(name) or not new.keeps(world.rank, name):
            tensor.grad = None


def routes(owners: Mapping[str, int], before: Ranks, after: Ranks) -> Iterator[Route]:
    """Yield routes from the owner of each tensor to every rank that needs it, and did not before."""
    for name in sorted(after.keys() & owners.keys()):
        for rank in after[name]:
            if rank not in before.get(name, ()):
                yield name, owners[name], rank


def _existing(world: World, routes: list[Route], mine: Collection[str]) -> list[Route]:
    """Return the routes of tensors that exist on their owner.  mine: those of this rank.  Collective."""
    present = set[str]().union(*world.gather_objects(list(mine)))
    return [route for route in routes if route[0] in present]

"""Which ranks hold which of the model's tensors under a plan, and how tensors move when the plan changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.shares import owners_of
from autopart.runtime.group.world import World
from autopart.runtime.sums.shared_values import Sharing
from autopart.runtime.tensors import LocalTensors, move_tensors

Route = tuple[str, int, int]
"""Name of a tensor, the rank that has it, the rank that needs it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """holders: the ranks that hold each parameter and buffer, ascending.  keepers: of those, the ones that keep its
    gradient and the optimizer's state: all, or where replicas share that, one of each stage.  owners: the one that
    answers for it: that of the first stage that uses a parameter, and for a buffer that of the stage that updates it.
    sharing: how the replicas of each stage share the optimizer's state.
    """

    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    keepers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)
    sharing: tuple[Sharing, ...] = ()

    def keeps(self, rank: int, name: str) -> bool:
        """Whether a rank that holds this tensor drives it."""
        return name not in self.keepers or rank in self.keepers[name]


def sharing_of(graph: Graph, decision: Decision) -> tuple[Sharing, ...]:
    """How the replicas of each stage share the optimizer's state.  O(ops + parameters * log(parameters)).

    Of a parameter that several stages use each has a copy with an owner; equal gradients and equal optimizers keep
    their values equal, as they keep those of replicas that share nothing.
    """
    ops = graph.op_map()
    trained = {param.name: param.size_bytes for param in graph.params if param.trainable}
    found = []
    for stage in decision.stages:
        used = dict.fromkeys(name for op in stage.ops for name in ops[op].params if name in trained)
        owners: dict[str, int] = {}
        if decision.zero and len(stage.ranks) > 1:
            dealt = owners_of({name: trained[name] for name in used}, len(stage.ranks))
            owners = {name: stage.ranks[dealt[name]] for name in used}
        found.append(Sharing(stage.ranks, owners, decision.bucket_bytes))
    return tuple(found)


def placement_of(graph: Graph, decision: Decision) -> Placement:
    """Where a plan puts the parameters and buffers of its graph; constants come with the stage's code.  O(ops)."""
    ops = graph.op_map()
    constants = {param.name for param in graph.params if param.kind == "constant"}
    holders: dict[str, set[int]] = {}
    keepers: dict[str, set[int]] = {}
    owners: dict[str, int] = {}
    shared = sharing_of(graph, decision)
    for stage, sharing in zip(decision.stages, shared, strict=True):
        for name in dict.fromkeys(name for op in stage.ops for name in ops[op].params if name not in constants):
            owner = sharing.owners.get(name)
            owners.setdefault(name, stage.ranks[0] if owner is None else owner)
            holders.setdefault(name, set()).update(stage.ranks)
            keepers.setdefault(name, set()).update(stage.ranks if owner is None else (owner,))
    writer = graph.writer()
    for buffer, value in graph.updates:
        stage = next(s for s in decision.stages if writer[value] in s.ops)
        owners[buffer] = stage.ranks[0]
        holders.setdefault(buffer, set()).update(stage.ranks)
    return Placement(
        {name: tuple(sorted(ranks)) for name, ranks in holders.items()},
        {name: tuple(sorted(ranks)) for name, ranks in keepers.items()},
        owners,
        shared,
    )


def relocate(
    world: World,
    old: Placement,
    new: Placement,
    before: LocalTensors,
    after: LocalTensors,
) -> None:
    """Bring the tensors that this rank held under `old`, and their gradients, to the holders under `new`.  Collective.

    before, after: what this rank holds, with the newest values.  Masters and gradients go to the keepers alone.  A
    tensor that no rank held before is not moved: no step has changed it.
    """
    move_tensors(world, list(_routes(old.owners, old.holders, new.holders)), {**after.held, **before.held})
    kept = list(_routes(old.owners, old.keepers, new.keepers))
    _move_masters(world, kept, old.owners, before, after)
    was, now = before.driven, after.driven
    _move_gradients(world, kept, old.owners, was, now)
    for name, tensor in was.items():
        if tensor is not now.get(name) or not new.keeps(world.rank, name):
            tensor.grad = None


def _routes(
    owners: Mapping[str, int], before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]
) -> Iterator[Route]:
    """To each rank that has a tensor afterwards and had none before."""
    for name in sorted(after):
        source = owners.get(name)
        if source is None:
            continue
        for rank in after[name]:
            if rank not in before.get(name, ()):
                yield name, source, rank


def _move_masters(
    world: World, routes: list[Route], owners: Mapping[str, int], before: LocalTensors, after: LocalTensors
) -> None:
    """Masters go to who drives the parameter now, also that of one which is frozen by now."""
    present = _present(world, [name for name in before.masters.by_name if owners.get(name) == world.rank])
    moving = [route for route in routes if route[0] in present]
    for name, _, target in moving:
        if target == world.rank and name not in after.masters.by_name:
            after.hold_master(name)
    move_tensors(world, moving, {**after.masters.by_name, **before.masters.by_name})
    after.masters.write()


def _present(world: World, mine: list[str]) -> set[str]:
    """The names of all ranks."""
    return {name for text in world.gather_text("\n".join(mine)) for name in text.split("\n")}


def _move_gradients(
    world: World,
    routes: list[Route],
    owners: Mapping[str, int],
    old_tensors: Mapping[str, torch.Tensor],
    new_tensors: Mapping[str, torch.Tensor],
) -> None:
    """As the tensors; what has no gradient where it was gets none."""
    mine = [n for n, t in old_tensors.items() if owners.get(n) == world.rank and t.grad is not None]
    present = _present(world, mine)
    moving = [route for route in routes if route[0] in present]
    gradients: dict[str, torch.Tensor] = {}
    for name, source, target in moving:
        if world.rank == source:
            gradient = old_tensors[name].grad
            assert gradient is not None
            gradients[name] = gradient
        elif world.rank == target:
            gradients[name] = torch.zeros_like(new_tensors[name])
    move_tensors(world, moving, gradients)
    for name, _, target in routes:
        if world.rank == target:
            new_tensors[name].grad = gradients.get(name)

"""Which ranks hold which of the model's tensors under a plan, and how tensors move when the plan changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.runtime.tensors import move_tensors
from autopart.runtime.world import World

Route = tuple[str, int, int]
"""Name of a tensor, the rank that has it, the rank that needs it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """holders: the ranks that hold each parameter and buffer, ascending.  owners: the one that answers for it: that of
    the first stage that uses a parameter, and for a buffer that of the stage that updates it."""

    holders: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, int]


def placement_of(graph: Graph, decision: Decision) -> Placement:
    """Where a plan puts the tensors of its graph.  O(ops)."""
    ops = graph.op_map()
    holders: dict[str, set[int]] = {}
    owners: dict[str, int] = {}
    for stage in decision.stages:
        for op in stage.ops:
            for name in ops[op].params:
                owners.setdefault(name, stage.ranks[0])
                holders.setdefault(name, set()).update(stage.ranks)
    writer = graph.writer()
    for buffer, value in graph.updates:
        stage = next(s for s in decision.stages if writer[value] in s.ops)
        owners[buffer] = stage.ranks[0]
        holders.setdefault(buffer, set()).update(stage.ranks)
    return Placement({name: tuple(sorted(ranks)) for name, ranks in holders.items()}, owners)


def relocate(
    world: World,
    old: Placement,
    new: Placement,
    old_tensors: Mapping[str, torch.Tensor],
    new_tensors: Mapping[str, torch.Tensor],
) -> None:
    """Bring the tensors that this rank held under `old`, and their gradients, to the holders under `new`.  Collective.

    old_tensors, new_tensors: what this rank holds, by name.  A tensor that no rank held before is not moved: no step
    has changed it.
    """
    routes = list(_routes(old, new))
    move_tensors(world, routes, {**new_tensors, **{n: t for n, t in old_tensors.items() if n not in new_tensors}})
    _move_gradients(world, routes, old.owners, old_tensors, new_tensors)
    for name, tensor in old_tensors.items():
        if name not in new_tensors:
            tensor.grad = None


def _routes(old: Placement, new: Placement) -> Iterator[Route]:
    for name in sorted(new.holders):
        source = old.owners.get(name)
        if source is None:
            continue
        for rank in new.holders[name]:
            if rank not in old.holders[name]:
                yield name, source, rank


def _move_gradients(
    world: World,
    routes: list[Route],
    owners: Mapping[str, int],
    old_tensors: Mapping[str, torch.Tensor],
    new_tensors: Mapping[str, torch.Tensor],
) -> None:
    """As the tensors; what has no gradient where it was gets none."""
    mine = [n for n, t in old_tensors.items() if owners.get(n) == world.rank and t.grad is not None]
    present = {name for text in world.gather_text("\n".join(mine)) for name in text.split("\n")}
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

"""What other trainers have words for in a plan: whole layers on stages, equal replicas, ranks that compute together,
micro-batches, recomputation.

What a plan has besides is listed in `unsaid`, each with what stands there instead.  A plan that nothing there is near,
such as one with unlike numbers of replicas, is refused.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

from autopart.ir.decision import Stage
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph, stage_modules
from autopart.ir.plan import Plan

_LAYER = re.compile(r"(?P<stack>.*?)\.?(?P<number>\d+)(\.|$)")


@dataclass(frozen=True)
class Facts:
    """A plan as other trainers see it.

    stack: path of the list of layers.  layers: numbers of those on each stage; again: those of them that run again in
    the backward.  modules: paths of all modules of each stage.  pipeline: groups of ranks of a pipeline; chunks: stages
    of each; replicas: of each stage; shards: ranks of a group, next to each other, which compute parts of the same rows
    (tensor parallelism), 1 for none.  micro_rows: of a micro-batch on one group.  loop: whether stage i is on group i
    modulo the pipeline.  apart: whether the replicas of a stage are a pipeline's length apart.  unsaid: what has no
    word.
    """

    stack: str
    layers: tuple[tuple[int, ...], ...]
    again: tuple[tuple[int, ...], ...]
    modules: tuple[tuple[str, ...], ...]
    pipeline: int
    chunks: int
    replicas: int
    shards: int
    micro_rows: int
    loop: bool
    apart: bool
    unsaid: tuple[str, ...]


def facts_of(plan: Plan, graph: Graph) -> Facts:
    """Return what others have words for.  graph: the captured graph of the plan.  Raises UsageError.  O(ops)."""
    shards, unsaid = plan.decision.shards, list[str]()
    groups = [_groups(stage) for stage in plan.stages]
    counts, widths = Counter(groups), sorted({len(group) for group in groups})
    if len(widths) > 1 or len(set(counts.values())) > 1:
        raise UsageError(
            "other trainers have no words near this plan",
            why=f"its stages have {' and '.join(map(str, widths))} replicas"
            if len(widths) > 1
            else "its ranks run unlike numbers of stages",
            fix="plan with replicas=N, and stages=N or stages_per_rank=N",
        )
    pipeline, replicas = len(counts), widths[0]
    loop, apart = all(group == groups[i % pipeline] for i, group in enumerate(groups)), False
    beside = [tuple(range(first, first + replicas)) for first in range(0, pipeline * replicas, replicas)]
    if groups[:pipeline] != beside:
        apart = groups[:pipeline] == [tuple(range(w, pipeline * replicas, pipeline)) for w in range(pipeline)]
        unsaid += [] if apart else ["which rank runs which stage: the trainer numbers them"]
    if shards > 1:
        unsaid.append(f"how {shards} ranks divide the ops of a stage: the trainer has rules of its own")
    if plan.decision.token_slices:
        unsaid.append(f"{plan.decision.slices} slices of sequences: sequences are whole")
    stack, layers, again = _layers(plan, graph, unsaid)
    modules = stage_modules([stage.ops for stage in plan.stages], graph)
    outer = tuple(tuple(p for p in own if not any(q.startswith(f"{p}.") for q in own)) for own in modules)
    micro_rows = _rows(plan, replicas, unsaid)
    return Facts(
        stack, layers, again, outer, pipeline, len(groups) // pipeline, replicas, shards, micro_rows, loop, apart,
        tuple(unsaid),
    )  # fmt: skip


def _groups(stage: Stage) -> tuple[int, ...]:
    """Return the groups of ranks that run a stage, ascending.

    Of n ranks that compute together, ranks i * n to i * n + n - 1 are group i; of others, which trainers do not have,
    the number is below 0.
    """
    found, shards = list[int](), stage.shards
    for first in range(0, len(stage.ranks), shards):
        own = sorted(stage.ranks[first : first + shards])
        beside = own == list(range(own[0], own[0] + shards)) and own[0] % shards == 0
        found.append(own[0] // shards if beside else -1 - own[0])
    return tuple(sorted(found))


def _rows(plan: Plan, replicas: int, unsaid: list[str]) -> int:
    rows = max(plan.micro_rows)
    if len(set(plan.micro_rows)) > 1:
        unsaid.append(f"micro-batches of {rows} and {rows - 1} rows: all have {rows}")
    if plan.stages[0].division.period > 1:  # each replica takes whole micro-batches
        return rows
    if rows % replicas or any(stage.shares for stage in plan.stages):
        unsaid.append(f"unequal shares of {rows} rows for {replicas} replicas: shares are equal")
    return -(-rows // replicas)


def _layers(
    plan: Plan, graph: Graph, unsaid: list[str]
) -> tuple[str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the list of layers, those of each stage, and those that run again: each whole, where most of it is."""
    found = {op.name: match for op in graph.ops if (match := _LAYER.match(op.module))}
    numbers: defaultdict[str, set[str]] = defaultdict(set)
    for match in found.values():
        numbers[match["stack"]].add(match["number"])
    stack, *others = sorted(numbers, key=lambda path: -len(numbers[path])) or [""]
    unsaid += [f"layers of {path}: only those of {stack} are counted" for path in others]
    layer_of = {name: int(match["number"]) for name, match in found.items() if match["stack"] == stack}
    where: defaultdict[int, Counter[int]] = defaultdict(Counter)
    again: Counter[int] = Counter()
    for s, stage in enumerate(plan.stages):
        for name in filter(layer_of.__contains__, stage.ops):
            where[layer_of[name]][s] += 1
        again.update(layer_of[name] for group in stage.recompute for name in group if name in layer_of)
    home = {layer: max(where[layer], key=lambda s: (where[layer][s], -s)) for layer in sorted(where)}
    if not home or any(home[layer] > home[after] for layer, after in pairwise(home)):
        why = "its layers run in another order than their numbers" if home else "it has no numbered layers"
        raise UsageError("other trainers have no words for the stages of this model", why=why, fix="use autopart")
    for layer, stages in sorted(where.items()):
        if len(stages) > 1:
            cut = f"{stack}.{layer} is cut between stages {' and '.join(map(str, sorted(stages)))}"
            unsaid.append(f"{cut}: it is whole on stage {home[layer]}")
    part = [layer for layer in home if 0 < again[layer] < where[layer].total()]
    if part:
        unsaid.append(f"parts of {len(part)} layers that run again: a layer does as a whole if most of it does")
    layers = tuple(tuple(layer for layer in home if home[layer] == s) for s in range(len(plan.stages)))
    most = {layer for layer in home if 2 * again[layer] > where[layer].total()}
    return stack, layers, tuple(tuple(filter(most.__contains__, own)) for own in layers)

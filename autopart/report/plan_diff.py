"""What changes from one plan to another, in the words of people: modules, milliseconds, GiB and percent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from autopart.ir.decision import Decision, Stage
from autopart.ir.errors import printable
from autopart.ir.graph import module_range
from autopart.ir.plan import Estimate, Outlook, Plan, Provenance

GIB = 2**30
_REST = {"alternatives": "the alternatives differ", "spans": "the simulated steps differ"}
"""Fields of an outlook that are too long to show, and what is said of them."""


def diff_plans(a: Plan, b: Plan) -> str:
    """Describe what changes from plan a to plan b, a line for each change.

    Ops that move are counted by the stages between which they move, and named by their modules.
    """
    if a == b:
        return "the plans are equal"
    lines = [
        *_made_for(a.provenance, b.provenance),
        *_decided(a.decision, b.decision),
        *_predicted(a.outlook, b.outlook),
        *(said for name, said in _REST.items() if getattr(a.outlook, name) != getattr(b.outlook, name)),
    ]
    return "\n".join(map(printable, lines)) or "the same ops in another order"


def _made_for(a: Provenance, b: Provenance) -> Iterator[str]:
    if a.structure_digest != b.structure_digest:
        yield f"made for another model (graph {a.structure_digest} -> {b.structure_digest})"
    elif a.graph_digest != b.graph_digest:
        yield f"made for other shapes or dtypes (graph {a.graph_digest} -> {b.graph_digest})"
    for name, what in (("torch_version", "torch"), ("costs", "costs"), ("precision", "precision")):
        if getattr(a, name) != getattr(b, name):
            yield f"{what}: {getattr(a, name)} -> {getattr(b, name)}"


def _decided(a: Decision, b: Decision) -> Iterator[str]:
    for name in [each.name for each in fields(a) if each.name not in ("stages", "micro_rows", "order")]:
        old, new = getattr(a, name), getattr(b, name)
        if old != new:
            yield f"{name}: {old} -> {new}"
    if a.shards != b.shards:
        yield f"tensor_parallel: {a.shards} -> {b.shards}"
    if a.order != b.order:
        yield "the order of the computes differs"
    if a.micro_rows != b.micro_rows:
        yield f"micro-batches: {_micro_batches(a)} -> {_micro_batches(b)}"
    if len(a.stages) != len(b.stages):
        yield f"stages: {len(a.stages)} -> {len(b.stages)}"
    for s, (old, new) in enumerate(zip(a.stages, b.stages, strict=False)):
        yield from _of_stage(s, old, new)
    yield from _moved(a, b)


def _of_stage(s: int, old: Stage, new: Stage) -> Iterator[str]:
    if old.ranks != new.ranks:
        yield f"stage {s} ranks: {list(old.ranks)} -> {list(new.ranks)}"
    if old.division != new.division and len(old.ranks) == len(new.ranks):
        alike = old.replicas == new.replicas
        before, after = (_division(old), _division(new)) if alike else (old.replicas, new.replicas)
        yield f"stage {s} replicas: {before} -> {after}"
    if old.recompute != new.recompute:
        yield f"stage {s} recomputed ops: {sum(map(len, old.recompute))} -> {sum(map(len, new.recompute))}"
    if old.forward_only != new.forward_only:
        yield f"stage {s} is forward only: {'yes -> no' if old.forward_only else 'no -> yes'}"
    if old.whole_backward != new.whole_backward:
        yield f"stage {s} backward: {'whole -> split' if old.whole_backward else 'split -> whole'}"


def _moved(a: Decision, b: Decision) -> Iterator[str]:
    """Yield a line for each pair of stages between which ops move.

    A plan names the modules of its stages, not those of its ops: what moves from one stage to another lies in the
    modules that both name.
    """
    before, after = _stages_of_ops(a), _stages_of_ops(b)
    moves: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name in dict.fromkeys([*before, *after]):
        move = before.get(name, ()), after.get(name, ())
        if move[0] != move[1]:
            moves.setdefault(move, []).append(name)
    for (home, target), names in moves.items():
        here = {module for s in home for module in a.stages[s].modules}
        there = [module for s in target for module in b.stages[s].modules if module in here]
        ops = "1 op" if len(names) == 1 else f"{len(names)} ops"
        named = f" of {module_range(there)}" if there else f", {module_range(names)}"
        yield f"{_stage(home)} -> {_stage(target)}: {ops}{named}"


def _predicted(a: Outlook, b: Outlook) -> Iterator[str]:
    if a.step_ns != b.step_ns:
        yield f"step: {_ms(a.step_ns, b.step_ns)}"
    if a.bubble != b.bubble:
        yield f"bubble: {a.bubble:.1%} -> {b.bubble:.1%}"
    bounds = [each.optimality.lower_bound if each.optimality else 0 for each in (a, b)]
    if bounds[0] != bounds[1]:
        yield f"lower bound: {_ms(*bounds)}"
    if len(a.estimates) == len(b.estimates):
        for s, (old, new) in enumerate(zip(a.estimates, b.estimates, strict=True)):
            changes = [
                f"{what} {write(getattr(old, name), getattr(new, name))}"
                for name, what, write in _SHOWN
                if getattr(old, name) != getattr(new, name)
            ]
            if old != new:
                yield f"stage {s}: {', '.join(changes) or 'parts of its times or its memory differ'}"
    else:
        yield f"fullest device: {_gib(_fullest(a.estimates), _fullest(b.estimates))}"
    limits = [min(each.limits, default=0) for each in (a, b)]
    if abs(limits[0] - limits[1]) > GIB // 1000:
        yield f"memory of the smallest device: {_gib(*limits)}"
    yield from (f"no longer noted: {note}" for note in a.notes if note not in b.notes)
    yield from (f"noted: {note}" for note in b.notes if note not in a.notes)


def _ms(old: int, new: int) -> str:
    """Write nanoseconds before and after."""
    return f"{old / 1e6:.3g} ms -> {new / 1e6:.3g} ms{_change(old, new)}"


def _gib(old: int, new: int) -> str:
    """Write bytes before and after."""
    return f"{old / GIB:.3g} GiB -> {new / GIB:.3g} GiB{_change(old, new)}"


def _change(old: int, new: int) -> str:
    return f" ({new / old - 1:+.1%})" if old and new else ""


_SHOWN = (("fwd_ns", "forward", _ms), ("bwd_ns", "backward", _ms), ("peak_bytes", "peak", _gib))


def _fullest(estimates: tuple[Estimate, ...]) -> int:
    return max((estimate.peak_bytes for estimate in estimates), default=0)


def _micro_batches(decision: Decision) -> str:
    """Return a text such as "8 of 4 rows", or "2 of 4 and 1 of 3 rows"."""
    counts = Counter(decision.micro_rows)
    return " and ".join(f"{count} of {rows}" for rows, count in counts.items()) + f" row{'s' * (max(counts) > 1)}"


def _division(stage: Stage) -> str:
    return "in turn" if stage.division.in_turn else f"shares of {' : '.join(map(str, stage.division.shares))}"


def _stages_of_ops(decision: Decision) -> dict[str, tuple[int, ...]]:
    homes: dict[str, list[int]] = {}
    for s, stage in enumerate(decision.stages):
        for name in stage.ops:
            homes.setdefault(name, []).append(s)
    return {name: tuple(stages) for name, stages in homes.items()}


def _stage(stages: tuple[int, ...]) -> str:
    return f"stage {'+'.join(map(str, stages))}" if stages else "no stage"

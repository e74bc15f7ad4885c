"""Plans for tests: strategies for valid plans, an example, and copies with changed fields."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import strategies as st

from autopart.ir.plan import Alternative, Decision, Estimate, Optimality, Outlook, Plan, Provenance, Stage
from autopart.ir.program import BUCKET_BYTES, MAX_BUCKET_BYTES
from autopart.passes.program.named import BUILT_IN, SEARCHED

SIZES = st.integers(0, 2**62)
WORDS = st.text(st.characters(codec="utf-8"), max_size=12)


def changed(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other values for these fields, whichever section each belongs to."""
    for section in fields(plan):
        old = getattr(plan, section.name)
        mine = {field.name: changes.pop(field.name) for field in fields(old) if field.name in changes}
        plan = replace(plan, **{section.name: replace(old, **mine)})
    assert not changes, f"no section of a plan has {', '.join(changes)}"
    return plan


def example() -> Plan:
    """Return a plan of two stages on two ranks with every field filled in."""
    estimate = Estimate(*range(1, 10))
    return Plan(
        Provenance("g", "s", "2.13.0+cpu"),
        Decision(2, (Stage(("a", "b"), (0,)), Stage(("c",), (1,))), (2, 2), "1f1b"),
        Outlook(estimates=(estimate, estimate), notes=("made by hand",)),
    )


@st.composite
def _stages(draw: st.DrawFn, ops: tuple[str, ...], ranks: tuple[int, ...]) -> Stage:
    """Draw a stage on one rank or on all of `ranks` that recomputes up to two groups of its ops."""
    again = draw(st.integers(0, len(ops)))
    groups = tuple(group for group in (ops[: again // 2], ops[again // 2 : again]) if group)
    own = ranks if draw(st.booleans()) else ranks[:1]
    return Stage(ops, own, groups, forward_only=draw(st.booleans()), whole_backward=draw(st.booleans()))


@st.composite
def decisions(draw: st.DrawFn, words: st.SearchStrategy[str] = WORDS) -> Decision:
    """Draw any valid decision. words: names of ops."""
    count = draw(st.integers(1, 4))
    ranks = draw(st.permutations(range(count + draw(st.integers(0, 2)))))
    names = draw(st.lists(words, min_size=count, max_size=12, unique=True))
    stages = tuple(
        draw(_stages(tuple(names[s::count]), (ranks[s], *ranks[count + s : count + s + 1]))) for s in range(count)
    )
    rows = draw(st.integers(1, 10**6))
    schedule = draw(st.sampled_from([schedule.name for schedule in BUILT_IN]))
    return Decision(
        world=len(ranks),
        stages=stages,
        micro_rows=tuple(rows + extra for extra in draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))),
        schedule=schedule,
        zero=draw(st.sampled_from([0, 0, 1])),
        token_slices=draw(st.just(()) | st.lists(st.integers(1, 10**6), min_size=2, max_size=5).map(tuple)),
        bucket_bytes=draw(st.just(BUCKET_BYTES) | st.integers(1, MAX_BUCKET_BYTES)),
        order=draw(_orders(stages)) if schedule == SEARCHED else (),
    )


@st.composite
def _orders(draw: st.DrawFn, stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """Draw some computes of micro-batch 0 on each of two workers."""
    kinds = [(s, "FB" if stage.whole_backward else "FBIW") for s, stage in enumerate(stages)]
    words = [f"{s}{kind}0" for s, own in kinds for kind in own]
    chosen = draw(st.lists(st.sampled_from(words), unique=True, min_size=1))
    cut = draw(st.integers(0, len(chosen)))
    return " ".join(chosen[:cut]), " ".join(chosen[cut:])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any valid plan."""
    decision = draw(decisions())
    estimates = st.builds(Estimate, **dict.fromkeys(Estimate.__dataclass_fields__, SIZES))
    report = Outlook(
        step_ns=draw(SIZES),
        bubble=draw(st.floats(0, 1)),
        estimates=draw(st.just(()) | st.tuples(*[estimates] * len(decision.stages))),
        notes=tuple(draw(st.lists(WORDS, max_size=2))),
        optimality=draw(st.none() | st.builds(Optimality, SIZES, SIZES, st.floats(0, 1), st.booleans())),
        alternatives=tuple(draw(st.lists(st.builds(Alternative, WORDS, SIZES, WORDS), max_size=2))),
    )
    return Plan(Provenance(draw(WORDS), draw(WORDS), draw(WORDS), draw(WORDS)), decision, report)

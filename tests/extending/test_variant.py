"""What is tried on the plans that the search has found is one function: an entry of `VARIANTS`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.languages.graphs import cluster, graph, plan_of

from autopart.ir.plan import Plan, check_decision
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program
from autopart.passes.search.evaluation import Search
from autopart.passes.search.variants import variants
from autopart.passes.search.variants.variants import VARIANTS, Variant

MODEL = graph("; ".join(f"v{i}:{1 + i * i % 7} +w{i} #{i % 5} <- {f'v{i - 1}' if i else 'x'}" for i in range(40)))


def planned(entries: tuple[Variant, ...], patch: pytest.MonkeyPatch) -> Plan:
    """Return the plan with these entries, proven."""
    patch.setattr(variants, "VARIANTS", entries)
    plan = plan_of(MODEL, cluster(4), micros=4, stages=4)
    check_decision(plan.decision, MODEL)
    check_program(route(plan.decision, MODEL), plan.schedule)
    return plan


def move_first_cut(search: Search, effort: int) -> None:
    """Evaluate the best plans, `effort` of them, with the first cut at every place before the second one."""
    for found in search.finalists(effort):
        _, _, *rest = found.candidate.bounds
        for cut in range(1, rest[0] if rest else 0):
            search.evaluate(found.space, replace(found.candidate, bounds=(0, cut, *rest)))


def test_a_new_entry_finds_a_plan_and_ends_where_its_effort_does(monkeypatch: pytest.MonkeyPatch) -> None:
    without = planned((), monkeypatch)
    found = planned((Variant("first cut", move_first_cut, 4),), monkeypatch)
    assert found.step_ns < without.step_ns
    assert planned((Variant("first cut", move_first_cut, 0),), monkeypatch) == without


@pytest.mark.parametrize("left_out", VARIANTS, ids=lambda variant: variant.name)
def test_a_plan_is_found_and_proven_without_any_entry(left_out: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(tuple(variant for variant in VARIANTS if variant is not left_out), monkeypatch)
    assert found.step_ns <= planned((), monkeypatch).step_ns

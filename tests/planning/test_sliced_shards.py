"""Plans in which the ranks of a group divide slices of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.tokens.decoder import Shape, decoder

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.graph import Size
from autopart.options import read_options
from autopart.passes.search.space import PlanRequest
from autopart.passes.search.variants.slicing import even_lengths
from autopart.passes.shards.choice import choose
from autopart.passes.tokens.recipe import CARRY, Recipe
from autopart.planning.derive.token_axis import token_recipe
from autopart.planning.shards import ways_to_divide

CASE = decoder(Shape())


def planned(batch: Any = None, model: Any = None, **options: Any) -> autopart.Plan:
    model = model or CASE.model(dtype=torch.float64)
    given = {"micro_batches": 1, "stages": 2, "costs": "analytic", "cache": False, "tensor_parallel": 2, **options}
    return autopart.plan(model, "cpu:4", sample=batch or CASE.data(4, torch.float64), **given)


def test_lengths_that_are_searched_are_multiples_of_the_ranks_of_a_group() -> None:
    for tokens, count, step in ((16, 4, 2), (18, 4, 2), (64, 8, 4), (20, 3, 4)):
        found = even_lengths(tokens, count, step)
        assert sum(found) == tokens and len(found) == count and all(n % step == 0 and n for n in found)


@pytest.mark.parametrize("lengths", [(8, 8), (9, 7)])
def test_slices_of_given_lengths_are_planned_with_and_without_cut_tokens(lengths: tuple[int, ...]) -> None:
    plan = planned(token_slices=lengths)
    assert plan.decision.token_slices == lengths and plan.decision.shards == 2
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan.outlook.optimality is not None and 0 < plan.outlook.optimality.lower_bound <= plan.step_ns


def test_a_number_of_slices_is_planned_with_lengths_that_ranks_divide_and_with_the_most_even_ones() -> None:
    cut, uncut = planned(token_slices=(4, 6, 6)), planned(token_slices=(5, 5, 6))
    plan = planned(token_slices=3)
    assert plan.step_ns == min(cut.step_ns, uncut.step_ns)
    (other,) = {(4, 6, 6), (5, 5, 6)} - {plan.decision.token_slices}
    text = {(4, 6, 6): "4 6x2", (5, 5, 6): "5x2 6"}[other]
    assert f"tensor_parallel=2, slices of {text} tokens" in [each.name for each in plan.outlook.alternatives]


def test_each_slice_has_the_latencies_of_its_exchanges() -> None:
    two, four = (planned(token_slices=count) for count in (2, 4))
    alone = [planned(token_slices=count, tensor_parallel=1, replicas=1) for count in (2, 4)]
    busy = [sum(e.fwd_ns + e.bwd_ns for e in plan.estimates) for plan in (two, four)]
    assert busy[0] == busy[1]  # of whole sequences
    assert four.step_ns - two.step_ns > alone[1].step_ns - alone[0].step_ns


def test_searched_slices_are_cut_along_tokens_where_lengths_allow_it_else_both_ways_are_planned() -> None:
    batch = flatten(CASE.data(4, torch.float64))
    captures = CaptureCache(CASE.model(dtype=torch.float64))
    graph, recipe = captures(batch, Size(4)).graph, token_recipe(captures, batch, Size(4))
    assert isinstance(recipe, Recipe)
    options = read_options(tensor_parallel=2, token_slices="auto")
    request = PlanRequest(((4,),), token_slices="auto", token_axis=recipe.axis())
    ((found, own),) = ways_to_divide(graph, 2, request, recipe, options)
    assert found == choose(graph, 2) and own.token_step == 2
    name = next(name for name, form in recipe.forms.items() if form.queries is not None and form.queries.axis == 1)
    behind = replace(recipe.ops[graph.writer()[name]], how=CARRY)  # as if it needed all tokens before
    other = replace(recipe, ops={**recipe.ops, graph.writer()[name]: behind})
    (whole, first), (uncut, second) = ways_to_divide(graph, 2, request, other, options)
    assert whole == found and first.token_slices == () and second.token_slices == "auto" and uncut != found

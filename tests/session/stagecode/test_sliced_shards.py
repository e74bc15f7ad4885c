"""The code of slices that the ranks of a shard group run gives the loss and every gradient of the whole program."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.extending.shards_in_process import captured_at, drawn, sliced_errors
from support.models.tokens import token_models as small
from support.models.tokens.causal_zoo import CAUSAL
from support.models.tokens.decoder import Shape, decoder
from support.models.tokens.unusual_token_models import EXACT as UNUSUAL
from support.models.zoo import CASES
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Size
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.calls import calls_of
from autopart.passes.shards.choice import choose
from autopart.passes.shards.factors import factors_of
from autopart.passes.shards.states import COPY, CUT_KIND, PARTIAL_KIND
from autopart.passes.shards.strategies import Strategy, strategies
from autopart.passes.tokens.recipe import Recipe
from autopart.planning.derive.sliced_shards import choice_for, kept_state, sliced_problem, why_not
from autopart.planning.derive.token_axis import token_recipe
from autopart.runtime.stages.slice_functions import last_of
from autopart.stagecode import slice_graph

EXACT = 1e-10
EVEN, ODD = (8, 2, 6), (7, 5, 3, 1)
SHORT = (6, 4, 2), (5, 4, 3)
FAST = ("llama_tied", "tril_softmax", "causal_convolution", "running_mean", "shift_by_cat", "packed", "two_terms")
"""What runs by default."""
MODELS = (
    "llama_tied", "gpt2_eager", "llama", "qwen3", "gpt2", "gpt_neox", "opt", "gemma2", "mistral", "falcon", "phi",
    "bloom", "gpt_neo", "llama_packed", "mixtral",
)  # fmt: skip
SMALL = {
    **{name: (mixer, "", None) for name, mixer in {**small.CAUSAL, **UNUSUAL}.items()},
    "with_padding": (small.with_padding, "padding", None),
    "packed": (small.packed, "documents", None),
    **{name: (small.tril_softmax, "", loss) for name, loss in small.LOSSES.items()},
}
"""Mixers of tokens and losses: what looks back, the mask of the batch, and the loss."""


def case_of(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    case = (CASES | CAUSAL)[name]
    return case.model(dtype=torch.float64), case.data(2, torch.float64)


def sliced_case(model: nn.Module, sample: Any, rows: int = 2) -> tuple[Any, Any, Recipe]:
    captured, inputs = captured_at(model, sample, rows)
    recipe = token_recipe(CaptureCache(model), flatten(sample), Size(rows))
    assert isinstance(recipe, Recipe), recipe
    return captured, inputs, recipe


def cuts_tokens(captured: Any, found: Any, recipe: Recipe) -> bool:
    """Return whether a value is cut along its tokens."""
    forms = {name: form.queries for name, form in recipe.forms.items() if form.queries is not None}
    return any(found.states[n].kind == CUT_KIND and found.states[n].axis == at.axis for n, at in forms.items())


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_models_are_exact_in_slices_with_and_without_cut_tokens(name: str) -> None:
    captured, inputs, recipe = sliced_case(*case_of(name))
    half = len(captured.graph.ops) // 2
    for shards in (2,) if name in FAST else (2, 4):
        for lengths in (EVEN, ODD) if name in FAST else (EVEN, ODD, (4, 12)):
            try:
                found = choice_for(captured.graph, shards, recipe, lengths)
            except RefusedError as refusal:
                assert shards == 4 and "equal parts" in refusal.what
                continue
            even = all(length % shards == 0 for length in lengths)
            assert cuts_tokens(captured, found, recipe) == even
            assert sliced_errors(captured, inputs, found, recipe, lengths, (half,), again=0.7 * even) < EXACT


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_what_looks_back_is_exact_or_refused_by_name(name: str) -> None:
    captured, inputs, recipe = small_case(name)
    for lengths in SHORT:
        try:
            found = choice_for(captured.graph, 2, recipe, lengths)
        except RefusedError as refusal:
            assert "nothing in the model can be divided" in refusal.what or "cannot be divided among" in refusal.what
            continue
        assert sliced_errors(captured, inputs, found, recipe, lengths) < EXACT


def small_case(name: str) -> tuple[Any, Any, Recipe]:
    mixer, mask, loss = SMALL[name]
    return sliced_case(small.Model(mixer, 2, loss).double(), small.token_batch(mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_are_exact_in_slices_under_any_legal_assignment(name: str) -> None:
    captured, inputs, recipe = sliced_case(*case_of(name))
    check_drawn(captured, inputs, recipe, (EVEN, ODD), 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_models_are_exact_in_slices_under_any_legal_assignment(name: str) -> None:
    captured, inputs, recipe = small_case(name)
    check_drawn(captured, inputs, recipe, SHORT, 40)


def check_drawn(captured: Any, inputs: Any, recipe: Recipe, lengths: tuple[tuple[int, ...], ...], count: int) -> None:
    for seed in range(count):
        found, own = drawn_for(captured, recipe, lengths[seed % 2], seed), lengths[seed % 2]
        assert sliced_problem(captured.graph, found, recipe, own) is None
        assert sliced_errors(captured, inputs, found, recipe, own, again=(seed % 3) / 2) < EXACT, (seed, own)


def drawn_for(captured: Any, recipe: Recipe, lengths: tuple[int, ...], seed: int) -> Any:
    """Return a random assignment of those that slices of these lengths allow."""
    return drawn(captured.graph, 2, seed, lambda call, way: not [*why_not(call, way, recipe, lengths, 2)])


def test_dropout_draws_what_one_process_draws() -> None:
    case = decoder(Shape(dropout=0.2, written_out=True, merged=True))
    captured, inputs, recipe = sliced_case(case.model(dtype=torch.float64), case.data(2, torch.float64))
    for lengths, again in ((EVEN, 1.0), (ODD, 0.0)):
        found = choice_for(captured.graph, 2, recipe, lengths)
        assert sliced_errors(captured, inputs, found, recipe, lengths, again=again) < EXACT


class Divided(small.Model):
    """A mixer of tokens before an MLP that ranks divide, with tokens cut between them."""

    def __init__(self, mixer: small.Mixer) -> None:
        super().__init__(lambda x, model: mixer(self.mlp(x), model))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_zeros_before_the_first_slice_stand_before_all_of_its_tokens() -> None:
    captured, inputs, recipe = sliced_case(Divided(SMALL["padded_convolution"][0]).double(), small.token_batch())
    found = choice_for(captured.graph, 2, recipe, SHORT[0])
    assert cuts_tokens(captured, found, recipe)
    assert sliced_errors(captured, inputs, found, recipe, SHORT[0]) < EXACT


def test_joined_tokens_of_which_slices_have_some_are_exact() -> None:
    captured, inputs, recipe = sliced_case(Divided(SMALL["shift_by_cat"][0]).double(), small.token_batch())
    for lengths in SHORT:
        found = choice_for(captured.graph, 2, recipe, lengths)
        assert sliced_errors(captured, inputs, found, recipe, lengths) < EXACT


def test_a_call_beside_the_ops_that_no_rule_is_known_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(block: torch.Tensor, axis: int) -> torch.Tensor:
        return last_of(block, axis)

    captured, inputs, recipe = sliced_case(Divided(SMALL["running_mean"][0]).double(), small.token_batch())
    found = choice_for(captured.graph, 2, recipe, SHORT[0])
    assert sliced_errors(captured, inputs, found, recipe, SHORT[0]) < EXACT
    monkeypatch.setattr(slice_graph, "last_of", newest)
    with pytest.raises(RefusedError, match="newest cannot be divided among 2 ranks") as refusal:
        sliced_errors(captured, inputs, found, recipe, SHORT[0])
    assert re.fullmatch(r"module .* at .*\.py:\d+", refusal.value.where)


def test_what_runs_at_full_length_is_no_addend() -> None:
    captured, _, recipe = sliced_case(*case_of("llama_tied"))
    found = choice_for(captured.graph, 2, recipe, ODD)
    factors = factors_of(captured.graph)
    adding = {
        call.op.name: way
        for call in calls_of(captured.graph)
        if call.op.name not in recipe.ops
        for way in strategies(call, factors, 2)
        if any(state.kind == PARTIAL_KIND for state in way.writes)
    }
    assert adding
    for name, way in adding.items():
        problem = sliced_problem(captured.graph, with_strategy(found, captured.graph, name, way), recipe, ODD)
        assert problem is not None and problem[0].name == name and "at full length" in problem[1]


class Scaled(small.Model):
    """A model whose tokens are multiplied by an fp32 parameter, cast once a step."""

    def __init__(self) -> None:
        super().__init__(lambda x, model: self.mixed(x))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.double().scale = nn.Parameter(torch.full((8,), 0.5))

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale.to(torch.float64)
        return x + self.down(torch.tanh(self.up(x)))


def test_a_parameter_that_is_cast_is_read_as_it_is_held() -> None:
    captured, inputs, recipe = sliced_case(Scaled(), small.token_batch())
    found = drawn_for(captured, recipe, SHORT[0], 0)
    cast = next(call for call in calls_of(captured.graph) if call.op.params == ("scale",))
    ways = strategies(cast, factors_of(captured.graph), 2)
    assert len(ways) == 3 and found.states["scale"] == COPY
    for way in ways:
        assigned = with_strategy(found, captured.graph, cast.op.name, way)
        assert sliced_errors(captured, inputs, assigned, recipe, SHORT[0]) < 1e-6, way  # a gradient in fp32


def with_strategy(found: Assignment, graph: Graph, name: str, way: Strategy) -> Assignment:
    """Return an assignment in which one op runs another way."""
    states = dict(zip(graph.op_map()[name].writes, way.writes, strict=True))
    return replace(found, strategies={**found.strategies, name: way}, states={**found.states, **states})


def is_wrong(*given: Any) -> bool:
    try:
        return sliced_errors(*given) > EXACT
    except (RuntimeError, ValueError):
        return True


def test_without_its_guards_a_slice_is_wrong() -> None:
    captured, inputs, recipe = small_case("tril_softmax")
    found = choose(captured.graph, 2)
    even, odd = SHORT
    problem = sliced_problem(captured.graph, found, recipe, odd)
    assert problem is not None and "cannot divide equally" in problem[1]
    assert is_wrong(captured, inputs, found, recipe, odd)
    for seed in range(40):  # until something is held with a part of its tokens, and kept with all of them
        found = drawn_for(captured, recipe, even, seed)
        kept = [n for n in recipe.forms if kept_state(found, recipe, n) != found.states[n]]
        if kept:
            assert not is_wrong(captured, inputs, found, recipe, even)
            break
    else:
        pytest.fail("nothing is kept in another state")

"""The code of the ranks of a shard group gives the loss and every gradient of the whole program, in threads."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.extending.shards_in_process import Group, captured_at, drawn, errors, run_whole
from support.models.random_models import Random, batch_of, steps
from support.models.tokens.by_hand import Gpt
from support.models.zoo import CASES, PHI3
from torch import nn

from autopart.ir.errors import PlanError, RefusedError
from autopart.passes.shards import states as table
from autopart.passes.shards.choice import choose
from autopart.passes.shards.states import KEEP, Transition
from autopart.runtime.stages import shard_group, weight_gradients

EXACT = 1e-10
FAST = ("gpt2", "llama_tied")
MODELS = (
    "gpt2", "llama_tied", "llama", "qwen3", "bert", "t5", "vit", "mixtral", "phi3", "opt", "gpt_neox", "gemma2",
    "by hand",
)  # fmt: skip


def captured_case(name: str) -> Any:
    if name == "by hand":
        torch.manual_seed(0)
        ids = torch.randint(0, 24, (4, 8))
        return captured_at(Gpt().double(), (ids, ids.roll(-1, 1)))
    case = PHI3 if name == "phi3" else CASES[name]
    return captured_at(case.model(dtype=torch.float64), case.data(4, torch.float64))


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_models_are_exact_under_the_rule(name: str) -> None:
    captured, inputs = captured_case(name)
    for shards in (2, 4):
        for sequence in (True, False):
            try:
                assignment = choose(captured.graph, shards, sequence=sequence)
            except RefusedError as refusal:
                assert shards == 4 and "equal parts" in refusal.what
                continue
            assert errors(captured, inputs, assignment) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_are_exact_under_any_legal_assignment(name: str) -> None:
    captured, inputs = captured_case(name)
    expected = run_whole(captured, inputs)
    found = [errors(captured, inputs, drawn(captured.graph, 2, seed), expected=expected) for seed in range(200)]
    print(f"{name}: 200 random assignments, worst error {max(found):.1e}")
    assert max(found) < EXACT, found.index(max(found))


@given(steps(), st.integers(0, 1 << 16))
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
def test_random_programs_are_exact_under_any_legal_assignment(program: tuple, seed: int) -> None:
    given = batch_of(4)
    batch = {name: t.double() if t.is_floating_point() else t for name, t in given.items() if t is not None}
    captured, inputs = captured_at(Random(program).double(), {**given, **batch}, 4)
    assume(any(value.grad for value in captured.graph.values))
    assert errors(captured, inputs, drawn(captured.graph, 2, seed)) < EXACT


class Grouped(nn.Module):
    """Attention whose keys have fewer heads than its queries: made by one product in parts of unlike size, or by
    three."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.sizes = [2 * heads, 2 * groups, 2 * groups]
        self.heads, self.groups = heads, groups
        self.qkv, self.out = nn.Linear(8, sum(self.sizes)), nn.Linear(2 * heads, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.q, self.k, self.v = nn.Linear(8, 2 * heads), nn.Linear(8, 2 * groups), nn.Linear(8, 2 * groups)
        self.o = nn.Linear(2 * heads, 8)

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in (q, k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.layer_norm(x, (8,))
        x = nn.functional.layer_norm(x + self.out(self.attended(*self.qkv(x).split(self.sizes, -1))), (8,))
        x = nn.functional.layer_norm(x + self.o(self.attended(self.q(x), self.k(x), self.v(x))), (8,))
        return (x + self.down(nn.functional.silu(self.up(x)))).square().mean()


@pytest.mark.parametrize(("heads", "groups", "shards"), [(4, 2, 2), (8, 2, 4), (8, 4, 4)])
def test_grouped_heads_are_cut_by_groups_or_inside_of_them(heads: int, groups: int, shards: int) -> None:
    torch.manual_seed(0)
    captured, inputs = captured_at(Grouped(heads, groups).double(), torch.randn(2, 8, 8, dtype=torch.double))
    found = choose(captured.graph, shards)
    pieces = found.pieces(captured.graph)
    assert {"q.weight", "o.weight", "up.weight"} <= pieces.keys()
    assert ("k.weight" in pieces) == (groups % shards == 0)
    assert pieces.keys().isdisjoint({"qkv.weight", "out.weight"})  # parts of unlike size stay whole, and exact
    assert errors(captured, inputs, found) < EXACT
    for seed in range(10):
        assert errors(captured, inputs, drawn(captured.graph, 2, seed)) < EXACT, seed


class Dropped(nn.Module):
    """Dropout of probabilities, of a tensor whose axes lie in another order in memory, and of the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.layer_norm(x, (8,))
        q, k, v = self.qkv(x).view(2, 6, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        found = nn.functional.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.3) @ v
        mixed = nn.functional.dropout(found.transpose(1, 2), 0.3).reshape(2, 6, 8)
        return self.head(x + nn.functional.dropout(self.out(mixed), 0.3)).square().mean()


def test_dropout_draws_for_the_whole_tensor() -> None:
    torch.manual_seed(0)
    captured, inputs = captured_at(Dropped().double(), torch.randn(2, 6, 8, dtype=torch.double))
    found = choose(captured.graph, 2)
    assert found.pieces(captured.graph).keys() == {"qkv.weight", "qkv.bias", "out.weight"}
    assert errors(captured, inputs, found) < EXACT
    for seed in range(20):
        assert errors(captured, inputs, drawn(captured.graph, 2, seed)) < EXACT, seed


class Mixed(nn.Module):
    """A bias behind a product that sums over ranks, a table that is read whole and cut, a mean over what is cut, and
    labels of which one rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.layer_norm(self.words(ids), (8,))
        x = x + self.down(torch.tanh(self.up(x)) * self.scale) + self.scale.sum() * x.square().mean(-1, keepdim=True)
        logits = x @ self.words.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def mixed() -> Any:
    torch.manual_seed(0)
    ids = torch.randint(0, 12, (2, 6))
    labels = ids.roll(-1, 1)
    labels[:, 1:4] = -1  # of the tokens that a rank has, others count
    return captured_at(Mixed().double(), (ids, labels))


def test_traps_are_exact_under_the_rule_and_under_any_legal_assignment() -> None:
    captured, inputs = mixed()
    assert errors(captured, inputs, choose(captured.graph, 2)) < EXACT
    for seed in range(20):
        assert errors(captured, inputs, drawn(captured.graph, 2, seed)) < EXACT, seed


@pytest.mark.parametrize("pair", sorted(table.TRANSITIONS))
def test_every_transition_counts(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong move of any transition that random assignments meet gives wrong numbers or another shape."""
    right = table.TRANSITIONS[pair]
    if right == Transition(KEEP, KEEP):
        return
    captured, inputs = mixed()
    wrong = replace(right, forward="first") if right.forward == KEEP else replace(right, forward=KEEP)
    wrong = wrong if right.backward == KEEP else replace(right, backward=KEEP)
    monkeypatch.setitem(table.TRANSITIONS, pair, wrong)
    found = []
    for seed in range(20):
        try:
            found.append(errors(captured, inputs, drawn(captured.graph, 2, seed)))
        except (RuntimeError, ValueError, IndexError, PlanError):
            found.append(1.0)
    assert max(found) > 1e-6


def test_a_block_has_two_gathers_and_two_scatters_each_way() -> None:
    captured, inputs = captured_case("gpt2")
    one, two = Group(2), Group(2)
    errors(captured, inputs, choose(captured.graph, 2), one)
    case = CASES["gpt2"].model(dtype=torch.float64)
    case.transformer.h = case.transformer.h[:1]
    shorter, inputs = captured_at(case, CASES["gpt2"].data(4, torch.float64))
    errors(shorter, inputs, choose(shorter.graph, 2), two)
    assert one.exchanges - two.exchanges == 2 * 8  # two blocks more


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", FAST)
def test_products_of_weights_beside_exchanges_give_the_same_gradients(
    name: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, inputs = captured_case(name)
    beside: list[int] = []
    plain = weight_gradients.add_all

    def add_all(gradients: list[Any], complete: Any = None) -> None:
        beside.append(len(gradients))
        plain(gradients, complete)

    monkeypatch.setattr(weight_gradients, "add_all", add_all)
    ops = [op.name for op in captured.graph.ops]
    groups = [ops[len(ops) // 4 : len(ops) // 2]] if recomputed else []
    kept, again = Group(2), Group(2)
    assignment = choose(captured.graph, 2)
    assert errors(captured, inputs, assignment, kept, again=groups) < EXACT
    assert not any(beside)  # without products that add by themselves
    assert errors(captured, inputs, assignment, again, again=groups, in_place=True) < EXACT
    assert sum(beside) >= 20  # of both members
    assert again.exchanges > kept.exchanges  # what was gathered for products was not kept


def test_what_is_gathered_again_is_not_kept() -> None:
    members, x = Group(1).member(0), torch.randn(4, 3, requires_grad=True)
    gather = shard_group.Exchange(members, ("gather", (0, 1), (0, 1)), ("scatter", (0, 1), (0, 1)))
    weight = nn.Parameter(torch.randn(5, 3))
    whole = gather(x)
    seen = weakref.ref(whole)
    made = weight_gradients.product(whole.view(2, 2, 3), weight, None, True)
    del whole
    assert seen() is None  # but a part of it
    made.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 5) @ weight) and torch.equal(weight.grad, torch.ones(5, 4) @ x)


def test_a_mean_over_a_cut_axis_is_not_the_mean_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, inputs = mixed()
    monkeypatch.setattr("autopart.stagecode.shards._Shards._mean", lambda self, node: None)
    assert max(errors(captured, inputs, drawn(captured.graph, 2, seed)) for seed in range(20)) > 1e-3


def test_words_that_do_not_exist_are_refused() -> None:
    members = Group(1).member(0)
    with pytest.raises(RuntimeError):
        shard_group.Vocabulary(members, 4)(torch.ones(4, 2), torch.tensor([4]))
    with pytest.raises(RuntimeError):
        shard_group.ClassEntropy(members, -100, mean=True)(torch.ones(1, 4), torch.tensor([7]))

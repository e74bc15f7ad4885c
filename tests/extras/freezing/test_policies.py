"""Policies: the published rule, a user's own, what a prefix is, and norms that are those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jobs.replan_jobs import Tower, batch
from support.jobs.step_jobs import refusal_of
from support.languages.graphs import graph, graphs
from support.workers import Workers
from torch import nn

import autopart
from autopart.extras.freezing.policies import PipeTransformer, closed_form
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.passes.graph.prefixes import layers_of, prefix_of

SCHEDULE = [0, 1, 3, 3, 1, 0]
"""How many layers a user's rule freezes, by epoch."""


def plans() -> list[autopart.Plan]:
    ways: list[dict[str, Any]] = [
        {"stages": 2, "replicas": 1, "cuts": ("layers.3",)},
        {"stages": 1, "replicas": 2, "zero": 1},
        {"stages": 1, "replicas": 2, "zero": 0},
    ]
    return [
        autopart.plan(Tower(), "cpu:2", sample=batch(0), costs="analytic", cache=False, micro_batches=2, **way)
        for way in ways
    ]


def layer_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    assert isinstance(model.layers, nn.ModuleList)
    return {f"layers.{i}": list(layer.parameters()) for i, layer in enumerate(model.layers)}


def plain_norms() -> dict[str, float]:
    model = Tower()
    model(batch(0)).backward()
    return {
        name: float(torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm())
        for name, params in layer_of(model).items()
    }


def norms_under(plan: autopart.Plan) -> dict[str, float]:
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plan) as pipe:
        pipe.step(batch(0))
        return autopart.freeze.PipeTransformer().norms(pipe)


def followed(plan: autopart.Plan) -> tuple[list[list[str]], list[bool], list[float], dict[str, float]]:
    """Train under a user's rule; return the frozen layers of each epoch, whether they changed, the losses, and the
    norms of the first step."""
    policy = autopart.freeze.Policy(lambda epoch, norms: SCHEDULE[epoch], layers="layers.?")
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plan) as pipe:
        pipe.step(batch(0))
        norms = policy.norms(pipe)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        flags, changed, losses = [], [], []
        for epoch in range(len(SCHEDULE)):
            changed.append(policy.apply(pipe, epoch))
            pipe.zero_grad()
            flags.append([n for n, own in layer_of(pipe.model).items() if not any(p.requires_grad for p in own)])
            losses.append(pipe.step(batch(epoch)).item())
            optimizer.step()
        return flags, changed, losses, norms


def plain_losses(flags: list[list[str]]) -> list[float]:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for epoch, frozen in enumerate(flags):
        optimizer.zero_grad()
        model.requires_grad_(True)
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        model.first.requires_grad_(not frozen)
        loss = model(batch(epoch))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def refused_prefix(plan: autopart.Plan) -> Any:
    policy = autopart.freeze.Policy(lambda epoch, norms: ["layers.1"])
    with autopart.compile(Tower(), "cpu:2", sample=batch(0), plan=plan) as pipe:
        pipe.step(batch(0))
        error = refusal_of(lambda: policy.apply(pipe, 1))
        pipe.step(batch(1))
        return error


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(240)

PUBLISHED = {
    1 / 5: [0, 3, 5, 6, 8, 9, 9, 10, 10, 11],
    1 / 3: [0, 4, 7, 9, 10, 11, 11, 12, 12, 12],
    1 / 2: [0, 6, 9, 11, 12, 12, 12, 12, 12, 12],
}
"""Frozen of twelve layers in epochs 0 to 9, by the published code's schedule."""


def rule(policy: PipeTransformer, epoch: int, norms: list[float]) -> int:
    return policy._rule(epoch, {f"layers.{i}": norm for i, norm in enumerate(norms)})  # type: ignore[return-value]


# ---- the published rule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", PUBLISHED)
def test_the_closed_form_has_the_published_figures(alpha: float) -> None:
    assert [closed_form(12, alpha, epoch) for epoch in range(10)] == PUBLISHED[alpha]
    policy = PipeTransformer(alpha, gradients=False)
    assert [rule(policy, epoch, [0.0] * 12) for epoch in range(10)] == PUBLISHED[alpha]


@pytest.mark.parametrize("alpha", PUBLISHED)
def test_norms_that_fall_with_the_depth_leave_the_bound_alone(alpha: float) -> None:
    policy = PipeTransformer(alpha)
    found = [rule(policy, epoch, [float(12 - i) for i in range(12)]) for epoch in range(10)]
    assert found == PUBLISHED[alpha]


def test_the_layer_with_the_smallest_norm_is_the_last_to_freeze() -> None:
    policy = PipeTransformer(1 / 2)
    assert rule(policy, 0, [1.0] * 8) == 0
    assert rule(policy, 1, [3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == 2
    assert rule(policy, 1, [9.0] * 8) == 2, "an epoch is decided once"
    assert rule(policy, 2, [0.0, 0.0, 2.0, 2.0, 1.0, 6.0, 7.0, 8.0]) == 5
    assert rule(policy, 3, [0.0] * 5 + [math.nan, math.inf, 8.0]) == 7


@given(st.floats(0.05, 0.95), st.integers(1, 24), st.data())
def test_the_rule_equals_its_formula(alpha: float, count: int, data: st.DataObject) -> None:
    policy, bound = PipeTransformer(alpha), 0.0
    for epoch in range(1, 6):
        norms = data.draw(st.lists(st.floats(0.1, 9), min_size=count, max_size=count))
        active = range(math.ceil(bound - 1e-9), count)
        calmest = min(active, key=lambda i: (norms[i], i), default=count - 1) + 1
        bound = min(bound + alpha * (count - bound), calmest)
        assert rule(policy, epoch, norms) == math.ceil(bound - 1e-9)
        again = PipeTransformer(alpha)
        again.load_state_dict(policy.state_dict())
        assert again.state_dict() == policy.state_dict()


def test_without_gradients_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="no layer has a gradient") as caught:
        rule(PipeTransformer(), 1, [0.0, 0.0])
    assert "before zero_grad" in caught.value.fix
    with pytest.raises(UsageError, match="alpha is 1"):
        PipeTransformer(1)


# ---- prefixes ------------------------------------------------------------------------------------------------------

ENCODER_DECODER = """
e +emb @shared <- x; a +p0 @encoder.block.0 <- e; b +p1 @encoder.block.1 <- a
f +emb @shared <- y; c +q0 @decoder.block.0 <- f; d +q1 @decoder.block.0.cross <- c b
g +q2 @decoder.block.1 <- d; h +out @head <- g
"""


def names(g: Graph, *patterns: str) -> list[str]:
    return [layer.name for layer in layers_of(g, patterns)]


def test_an_encoder_comes_before_the_decoder_that_reads_it() -> None:
    g = graph(ENCODER_DECODER)
    assert names(g) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert names(g, "decoder.*") == ["decoder.block"]
    layers = layers_of(g)
    assert layers[0].frozen == {"emb", "p0"} and layers[1].frozen == {"emb", "p0", "p1"}
    assert layers[2].frozen == {"emb", "p0", "p1", "q0", "q1"}
    with pytest.raises(UsageError, match=r"layer decoder.block.0 cannot freeze while encoder.block.0 learns"):
        prefix_of(layers, ["decoder.block.0"])
    with pytest.raises(UsageError, match=r"'encoder.block.7' is not a layer"):
        prefix_of(layers, ["encoder.block.7"])
    with pytest.raises(UsageError, match="5 layers cannot freeze"):
        prefix_of(layers, 5)
    with pytest.raises(UsageError, match="of layers= fits no module"):
        layers_of(g, ["nothing.*"])
    with pytest.raises(UsageError, match="no layers were found"):
        layers_of(graph("a +p @body <- x"))


def test_towers_that_do_not_read_each_other_freeze_apart() -> None:
    layers = layers_of(graph("a +p @left.0 <- x; b +q @left.1 <- a; c +r @right.0 <- y; d +s <- b c"))
    assert [layer.name for layer in layers] == ["left.0", "right.0", "left.1"]
    assert [layer.name for layer in prefix_of(layers, ["right.0"])] == ["right.0"]


def test_layers_that_depend_on_each_other_freeze_together() -> None:
    layers = layers_of(graph("a +p @m.0 <- x; b +q @m.1 <- a; c +p @m.0 <- b; d +r @head <- c"))
    assert [layer.name for layer in prefix_of(layers, 1)] == ["m.0", "m.1"]


@given(graphs(), st.data())
def test_what_a_prefix_freezes_is_all_that_its_layers_depend_on(g: Graph, data: st.DataObject) -> None:
    try:
        layers = layers_of(g)
    except UsageError:
        return
    writer, ops = g.writer(), g.op_map()
    params = {p.name for p in g.params if p.kind == "param"}

    def upstream(name: str) -> set[str]:
        return {name}.union(*(upstream(writer[read]) for read in ops[name].reads if read in writer))

    def inside(name: str, layer: str) -> bool:
        return f"{ops[name].module}.".startswith(f"{layer}.")

    for count in range(len(layers) + 1):
        chosen = [layer.name for layer in prefix_of(layers, count)]
        assert prefix_of(layers, chosen) == prefix_of(layers, count) and len(chosen) >= count
        frozen = frozenset[str]().union(*(layer.frozen for layer in layers if layer.name in chosen))
        own = [name for name in ops if any(inside(name, layer) for layer in chosen)]
        needed = set[str]().union(*(ops[up].params for name in own for up in upstream(name))) & params
        assert frozen == needed
        for up in {up for name in own for up in upstream(name)}:
            for layer in layers:
                assert not inside(up, layer.name) or layer.name in chosen


# ---- on running pipes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_norms_over_stages_and_replicas_are_those_of_one_process(pair: Workers) -> None:
    expected = plain_norms()
    for plan in plans():
        for found in pair.run(norms_under, plan):
            assert list(found) == list(expected)
            assert found == pytest.approx(expected, rel=1e-12)


def test_a_policy_freezes_on_all_ranks_and_thaws_what_it_froze(pair: Workers) -> None:
    for flags, changed, losses, norms in pair.run(followed, plans()[0]):
        assert norms == pytest.approx(plain_norms(), rel=1e-12)
        assert changed == [False, True, True, False, True, True]
        assert flags[0] == [] and flags[1] == ["layers.0"] and flags[2] == ["layers.0", "layers.1", "layers.2"]
        assert flags[3] == flags[2] and flags[4] == ["layers.0"] and flags[5] == []
        assert losses == pytest.approx(plain_losses(flags), rel=1e-12)


@pytest.mark.slow
def test_what_is_no_prefix_is_refused_on_all_ranks(pair: Workers) -> None:
    for error in pair.run(refused_prefix, plans()[0]):
        assert "cannot freeze while layers.0 learns" in str(error)


def test_the_names_are_public() -> None:
    kept: Any = autopart.freeze
    assert kept.PipeTransformer is PipeTransformer and issubclass(PipeTransformer, kept.Policy)
    assert torch.is_grad_enabled()

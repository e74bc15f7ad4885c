"""A captured program cut anywhere and played stage by stage is the whole program, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.models.random_models import Random, batch_of, steps
from support.oracles.one_process import gradient_error, gradients_of
from support.oracles.stages_in_process import inputs_of, plan_for, replay, slices
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.passes.graph.atoms import free_ops
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.rng import micro_key
from autopart.stagecode.split import cut

MICROS, ROWS = 2, 3
PARTS = list[set[str]]


def captured_model(program: tuple) -> Captured:
    return capture(Random(program), flatten(batch_of(ROWS)))


@st.composite
def scattered(draw: st.DrawFn, graph: Graph) -> PARTS:
    """Any assignment to stages along which values flow forwards; free ops may stand in several stages."""
    stages = draw(st.integers(1, 5))
    parts: PARTS = [set() for _ in range(stages)]
    writer, stage_of = graph.writer(), {}
    free = free_ops(graph)
    updated = {name for name, _ in graph.updates}
    for op in graph.ops:
        low = max((stage_of[writer[r]] for r in op.reads if r in writer), default=0)
        stage = min(stages - 1, low + draw(st.sampled_from([0, 0, 0, 1, 2])))
        if updated.intersection(op.params):
            stage = max([stage, *(stage_of[o.name] for o in graph.ops if o.name in stage_of and o.params == op.params)])
        stage_of[op.name] = stage
        parts[stage].add(op.name)
        if op.name in free:
            for other in draw(st.sets(st.integers(stage, stages - 1), max_size=2)):
                parts[other].add(op.name)
    return parts


def check_equal(
    program: tuple, captured: Captured, parts: PARTS, schedule: str, recompute: dict[int, PARTS] | None = None
) -> None:
    """Stages against the plain module over the same micro-batches: loss, gradients, buffers."""
    plain = Random(program)
    batches = [batch_of(ROWS, seed) for seed in range(MICROS)]
    loss = torch.zeros(())
    for batch in batches:
        part = plain(**batch)
        part.backward()
        loss = loss + part.detach()
    plan = plan_for(captured.graph, parts, MICROS, schedule, recompute)
    found = replay(captured, plan, [inputs_of(captured, b) for b in batches])
    torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-5)
    expected = gradients_of(plain)
    error, worst = gradient_error({name: found.gradients.get(name) for name in expected}, expected)
    assert error <= 1e-5, worst
    buffers = dict(plain.named_buffers())
    for name, value in found.buffers.items():
        torch.testing.assert_close(value, buffers[name], rtol=1e-5, atol=1e-6)


@st.composite
def recomputed(draw: st.DrawFn, parts: PARTS) -> dict[int, PARTS]:
    """Any groups of ops of each stage, connected or not: ops that would make a group non-convex run outside of it."""
    groups: dict[int, PARTS] = {}
    for stage, ops in enumerate(parts):
        group_of = {op: draw(st.integers(-1, 2)) for op in sorted(ops)}
        groups[stage] = [{op for op, group in group_of.items() if group == number} for number in range(3)]
    return groups


def quiet(examples: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, suppress_health_check=checks, derandomize=True)


WAYS = 3
"""Ways to cut that are drawn for each captured program: a capture costs far more than a step through its stages."""


def sliced(data: st.DataObject, program: tuple) -> None:
    captured = captured_model(program)
    assume(any(v.grad for v in captured.graph.values))
    for _ in range(WAYS):
        bounds = data.draw(st.lists(st.integers(0, len(captured.graph.ops)), max_size=4))
        try:
            plan_for(captured.graph, slices(captured.graph, bounds))
        except PlanError as error:
            assert "updated" in str(error)  # the uses of a buffer that changes cannot be parted
            continue
        check_equal(program, captured, slices(captured.graph, bounds), data.draw(st.sampled_from(SCHEDULES)))


def anywhere(data: st.DataObject, program: tuple) -> None:
    captured = captured_model(program)
    assume(any(v.grad for v in captured.graph.values))
    for _ in range(WAYS):
        parts = data.draw(scattered(captured.graph))
        check_equal(program, captured, parts, "1f1b", data.draw(recomputed(parts)))


@quiet(4)
@given(data=st.data(), program=steps())
def test_cut_at_arbitrary_places_it_equals_the_plain_module(data, program):
    sliced(data, program)


@quiet(4)
@given(data=st.data(), program=steps())
def test_scattered_over_stages_with_repeated_and_recomputed_ops_it_equals_the_plain_module(data, program):
    anywhere(data, program)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@quiet(100)
@given(data=st.data(), program=steps())
def test_many_cuts_at_arbitrary_places(data, program):
    sliced(data, program)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@quiet(100)
@given(data=st.data(), program=steps())
def test_many_scattered_programs(data, program):
    anywhere(data, program)


@quiet(3)
@given(data=st.data(), program=steps(random=True))
@pytest.mark.slow
def test_random_numbers_do_not_depend_on_the_cuts(data, program):
    captured = captured_model(program)
    assume(any(op.random for op in captured.graph.ops) and any(v.grad for v in captured.graph.values))
    micros = [inputs_of(captured, batch_of(ROWS, seed)) for seed in range(MICROS)]
    whole = replay(captured, plan_for(captured.graph, slices(captured.graph, []), MICROS), micros)
    for _ in range(WAYS):
        parts = data.draw(scattered(captured.graph))
        again = data.draw(recomputed(parts))
        found = replay(captured, plan_for(captured.graph, parts, MICROS, recompute=again), micros)
        assert torch.equal(found.loss, whole.loss)
        error, worst = gradient_error(found.gradients, whole.gradients)
        assert error <= 1e-5, worst


@pytest.mark.parametrize("draw", [lambda x: nn.functional.dropout(x, 0.5), torch.randn_like, torch.bernoulli])
def test_random_numbers_do_not_depend_on_how_values_lie_in_memory(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.sigmoid().unflatten(-1, (2, 4)).transpose(1, 2)
            return (heads * draw(heads.sin().sigmoid())).transpose(1, 2).square().mean()

    x = torch.randn(ROWS, 5, 8)
    captured = capture(Drawing(), flatten({"x": x}))
    ops, device = [op.name for op in captured.graph.ops], torch.device("cpu")
    first = next(place for place, op in enumerate(ops) if "transpose" in op) + 1
    whole = cut(captured, ops, captured.graph.outputs, device)
    before = cut(captured, ops[:first], [captured.graph.ops[first - 1].writes[0]], device)
    after = cut(captured, ops[first:], captured.graph.outputs, device)
    x.requires_grad_()
    with micro_key(0, 0, 0):
        (expected,) = whole.module(x)
        (passed,) = before.module(x)
        assert not passed.is_contiguous()
        (found,) = after.module(passed.contiguous())  # as it comes from another stage
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*[torch.autograd.grad(each, x)[0] for each in (found, expected)])

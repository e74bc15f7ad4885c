"""When nothing fits: the message names the stage, the bytes and a change, and the change works."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, layers, plan_of, source
from support.oracles.planner_oracle import Kind, Problem, fits, problem

from autopart.ir.cluster import Cluster
from autopart.ir.errors import InfeasibleError
from autopart.passes import pipeline
from autopart.passes.pipeline import build
from autopart.passes.search.diagnostics import mib
from autopart.passes.search.space import PlanRequest

UNITS = {"bytes": 1, "MiB": 1 << 20, "GiB": 1 << 30}


def failure(p: Problem) -> InfeasibleError | None:
    try:
        build(p.source, p.cluster, p.request)
    except InfeasibleError as error:
        return error
    return None


def left(request: PlanRequest, names: str) -> PlanRequest:
    """Without what is named, and that alone."""
    free: dict[str, Any] = {"stages": None, "pins": {}, "replicas": None, "cuts": (), "together": ()}
    return replace(request, **{name: free[name] for name in names.split(" and ")})


def changed(p: Problem, advice: str) -> Problem:
    """The problem with the change that the text asks for, done as a user would."""
    request, c = p.request, p.cluster
    if re.match(r'allow recompute="auto"', advice):
        return replace(p, request=replace(request, recompute="auto"))
    if found := re.match(r'use schedule="(\S+)"', advice):
        return replace(p, request=replace(request, schedule=found[1]))
    if found := re.match(r"leave (.+) to the planner", advice):
        return replace(p, request=left(request, found[1]))
    if found := re.match(r"use micro_batches=(\d+)", advice):
        assert int(found[1]) == sum(request.micro_rows[0])
        return replace(p, request=replace(request, micro_rows=((1,) * int(found[1]),)))
    if re.match(r"use an optimizer without state", advice):
        return replace(p, request=replace(request, state_factor=0.0))
    if found := re.match(r"use (\d+) such devices", advice):
        factor = int(found[1]) // c.world
        last = replace(c.levels[-1], size=c.levels[-1].size * factor)
        more = Cluster(c.devices * factor, (*c.levels[:-1], last))
        also = re.search(r"and leave (.+) to the planner", advice)
        return replace(p, cluster=more, request=left(request, also[1]) if also else request)
    if found := re.match(r"use devices with ([\d.]+) (\w+)", advice):
        memory = int(float(found[1]) * UNITS[found[2]])
        devices = tuple(replace(d, memory_bytes=max(d.memory_bytes, memory)) for d in c.devices)
        return replace(p, cluster=replace(c, devices=devices))
    raise AssertionError(f"unknown advice: {advice}")


def check(p: Problem) -> str:
    """Check the message of a problem without a plan; what it proposes."""
    error = failure(p)
    if error is None:
        return "fits"
    assert re.search(r"stage \d+ of \d+ needs [\d.]+ \w+ and may use [\d.]+ \w+, [\d.]+ \w+ too much", error.what), (
        error
    )
    assert error.where and error.why and error.fix
    if "tried, fits" not in error.fix:
        return error.fix
    better = changed(p, error.fix)
    plan = build(better.source, better.cluster, better.request)
    assert fits(plan.stages, plan.estimates, better.cluster)
    if not error.fix.startswith("use devices with"):  # tried with as much more on every device, done with the largest
        assert (len(plan.stages), len(plan.micro_rows), plan.schedule) == said(error.fix)
    return error.fix.split(":")[0]


def said(fix: str) -> tuple[int, int, str]:
    """Stages, micro-batches and schedule that a proposed change was said to fit with."""
    found = re.search(r"fits with (\d+) stages?, (\d+) micro-batch(?:es)?, (\S+)$", fix)
    assert found, fix
    return int(found[1]), int(found[2]), found[3]


def tight(random: Random) -> Problem:
    """A problem on devices that have too little for most."""
    p = problem(random, Kind(least=2, most=5, devices=3))
    devices = tuple(replace(d, memory_bytes=random.randint(20, 300)) for d in p.cluster.devices)
    return replace(p, cluster=replace(p.cluster, devices=devices))


@settings(max_examples=3)
@example(Random(12195))  # two stages are faster, one is preferred
@given(st.randoms(use_true_random=True))
def test_proposed_change_fits(random: Random) -> None:
    event(re.sub(r"[\d.]+", "N", check(tight(random))))


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"replicas": 2}, "leave replicas to the planner"),
        ({"stages": 1}, "leave stages to the planner"),
        ({"stages": 1, "replicas": (2,)}, "leave replicas and stages to the planner"),
    ],
)
def test_one_option_is_left_out_before_hardware_is_asked_for(asked: dict[str, Any], said: str) -> None:
    g = graph("a:1 @a +v:40 <- x; b:1 @b +w:60 <- a", input_bytes=0)
    error = failure(Problem(g, cluster(2, memory=300), PlanRequest(((2,),), recompute="off", **asked)))
    assert error is not None and error.fix.startswith(said), error


def test_what_nobody_asked_for_is_not_left_to_the_planner() -> None:
    """Cuts imply the number of stages, which the user did not give and cannot leave out."""
    g = graph("a:1 @a +v:40 <- x; b:1 @b +w:60 <- a; c:1 @c +u:9 <- b", input_bytes=0)
    error = failure(
        Problem(g, cluster(3, memory=200), PlanRequest(((2,),), cuts=("c",), recompute="off", state_factor=0.0))
    )
    assert error is not None and error.fix.startswith("leave cuts to the planner"), error


def test_another_schedule_is_proposed_with_what_it_implies() -> None:
    """A V implies two stages a rank, 1F1B one: on twice the ranks, each has half as much to hold."""
    p = Problem(layers(4), cluster(4, memory=1000), PlanRequest(((1,) * 4,), schedule="zb-v", stages=4, replicas=1))
    assert check(p) == 'use schedule="1f1b"'


def test_devices_too_slow_to_plan_for_are_named_as_the_reason() -> None:
    years = 2**55
    error = failure(Problem(graph(f"a:{years} +w <- x; b:{years} <- a"), cluster(2), PlanRequest(((1, 1),))))
    assert error is not None and "the devices are too slow" in error.what
    assert "operations/s" in error.where and "memory" not in error.fix


def test_message_names_modules_and_all_kinds_of_memory() -> None:
    g = graph("a:1 #0 ^100 @enc.0 +w:50 <- x; b:1 #0 @enc.1 <- a", input_bytes=0)
    error = failure(Problem(g, cluster(1, memory=250), PlanRequest(((1,),), recompute="off")))
    assert error is not None
    assert "enc.0 to enc.1" in error.where
    for part in ("weights 50 bytes", "gradients and optimizer state 150 bytes", "activations 1 x 100 bytes"):
        assert part in error.why


@pytest.mark.slow
def test_message_names_the_modules_of_its_stage_whatever_blocks_it_was_searched_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = Problem(layers(80), cluster(3), PlanRequest(((1,) * 4,)))
    stages, ops = build(p.source, p.cluster, p.request).stages, p.model.op_map()
    monkeypatch.setattr(pipeline, "finalize", lambda seen, *given: seen[0])  # none fits over captured ops
    error = failure(p)
    assert error is not None
    stage = stages[int(error.what.split("stage ")[1].split()[0])]
    assert error.where.startswith(f"{ops[stage.ops[0]].module} to {ops[stage.ops[-1]].module}, "), error.where


@pytest.mark.parametrize(
    "size", [1, 1023, (1 << 20) - 1, 1 << 20, (1 << 20) + 40_000, 3_333_333_333, 11 << 30, 98_765_432_109]
)
def test_memory_that_is_asked_for_is_enough_when_typed(size: int) -> None:
    """Rounded up: who buys what the message says has enough."""
    number, unit = mib(size).split()
    assert size <= float(number) * UNITS[unit] + 1e-6 <= size * 1.11 + 1


def test_large_devices_that_are_proposed_are_large_enough() -> None:
    """Sizes beyond a MiB are rounded in the message; what it says must still be enough."""
    for extra in range(0, 100_000, 9_999):
        g = graph(f"a:1 #0 ^{(3 << 20) + extra} <- x", input_bytes=0)
        p = Problem(g, cluster(1, memory=1 << 20), PlanRequest(((1,),), state_factor=0.0))
        assert check(p).startswith("use devices with")


def test_alternatives_say_what_speaks_against_them() -> None:
    g = graph("; ".join(f"v{i}:50 #8 +w{i}:8 @m.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(6)))
    p = Problem(g, cluster(3), PlanRequest(((6,), (1,) * 6)))
    plan = build(p.source, p.cluster, p.request)
    assert all(a.name and a.why for a in plan.outlook.alternatives)
    assert all(a.step_ns >= plan.step_ns or not a.step_ns for a in plan.outlook.alternatives)
    for wish, shown in (
        ({"stages": 2}, "stages=2"),
        ({"pins": {"m.5": 1}}, "pins="),
        ({"cuts": ("m.2",)}, "cuts=['m.2']"),
    ):
        asked = Problem(g, cluster(3), PlanRequest(((6,), (1,) * 6), **wish))  # type: ignore[arg-type]
        plan = build(asked.source, asked.cluster, asked.request)
        faster = [a.why for a in plan.outlook.alternatives if 0 < a.step_ns < plan.step_ns]
        assert faster and all(f"you asked for {shown}" in why for why in faster), plan.outlook.alternatives


@pytest.mark.parametrize(
    ("request_of", "why", "fix"),
    [
        (PlanRequest(((2, 2),), replicas=4, policy="turn"), "a step has 2 of them at most", "at least 4 micro-batches"),
        (PlanRequest(((4,),), replicas=8), "micro-batches have 4 rows at most", "use at most 4 replicas"),
    ],
)
def test_more_replicas_than_have_work_are_named_as_the_cause(request_of: PlanRequest, why: str, fix: str) -> None:
    with pytest.raises(InfeasibleError) as raised:
        build(source(layers(4), cluster(8)), cluster(8), request_of)
    assert why in raised.value.why and fix in raised.value.fix


def test_a_stage_that_has_the_loss_alone_is_noted() -> None:
    g = graph("a:1000 #9 +w:8 @body <- x; loss:1 #1 @loss <- a")
    notes = plan_of(g, cluster(2), rows=(1,), stages=2).notes
    assert any(note.startswith("stage 1 has 0.1% of the work: with 1 micro-batch no even cut") for note in notes)
    assert not plan_of(layers(4), cluster(2), stages=2).notes

"""Frozen layers: stages where nothing learns have no backward, and the planner, its bound and its orders know it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, frozen, graph, graphs, layers, plan_of, source
from support.languages.orderings import Case, cases
from support.languages.parts import parse_actions, parts_text
from support.oracles.order_oracle import best_step_ns
from support.oracles.planner_oracle import Kind, Problem, candidates, compare, problem, problems, says

from autopart.ir.actions import ACTIONS, FORWARD
from autopart.ir.decision import Decision, Stage, check_decision
from autopart.ir.errors import PlanError, ProgramError
from autopart.ir.graph import Graph
from autopart.ir.program import MESSAGES_AHEAD
from autopart.passes.ordering.pipeline import Pipeline
from autopart.passes.program.messages import check_messages
from autopart.passes.program.orders import LOOP, V, placed
from autopart.passes.program.routing import edges, route, tied, unsummed_stages, with_forward_only
from autopart.passes.program.verify import check_program
from autopart.passes.proof.lower_bound import lower_bound
from autopart.passes.search.evaluation import evaluate
from autopart.passes.simulation.estimate import estimate, simulated_ns, stage_estimates
from autopart.passes.simulation.simulate import simulate, step_ns
from autopart.passes.simulation.stage_costs import Estimator
from autopart.report.plan_diff import diff_plans

CHAIN = "a:2 +p <- x; b:2 +q <- a; c:2 +r <- b; d:2 +s <- c"


def decided(g: Graph, stages: str, schedule: str = "1f1b", micros: int = 2, homes: tuple[int, ...] = ()) -> Decision:
    names = [tuple(own.split()) for own in stages.split("|")]
    homes = homes or tuple(range(len(names)))
    placed_on = tuple(Stage(own, (home,)) for own, home in zip(names, homes, strict=True))
    decision = Decision(1 + max(homes), placed_on, (1,) * micros, schedule)
    return with_forward_only(decision, g.learning_ops())


# ---- programs ------------------------------------------------------------------------------------------------------


def test_a_frozen_first_stage_as_drawn() -> None:
    g = frozen(graph("a +p <- x; b +q <- a"), 1)
    program = check_program(route(decided(g, "a | b"), g), "1f1b")
    assert parts_text(program) == "0F0 0SF0>1 0F1 0SF1>1 0A\n1RF0<0 1F0 1B0 1RF1<0 1F1 1B1 0A 1O"
    assert program.forward_only == (0,) and program.edges[0].grads == ()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-deep", "zb-h1", "zb-h2", "interleaved", "zb-v"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_schedule_leaves_out_the_backwards_of_frozen_stages(schedule: str, count: int) -> None:
    g = frozen(graph(CHAIN), count)
    homes = {"interleaved": placed(LOOP, 4, 2), "zb-v": placed(V, 4, 2)}.get(schedule, ())
    decision = decided(g, "a | b | c | d", schedule, 5, homes)
    program = check_messages(check_program(route(decision, g), schedule))
    behind = [a for a in program.order if a.stage < count and a.kind not in ("F", "SF", "A")]
    assert not behind
    assert {a.stage for a in program.order if ACTIONS[a.kind].way != FORWARD} == set(range(count, 4))


def test_replicas_of_a_frozen_stage_sum_nothing_but_buffers() -> None:
    g = frozen(graph("a,m +p ~run =run <- x; b +q <- a; c +r <- b"), 2)
    stages = (Stage(("a",), (0, 1)), Stage(("b",), (2, 3)), Stage(("c",), (4, 5)))
    decision = with_forward_only(Decision(6, stages, (4, 4), "1f1b"), g.learning_ops())
    program = check_messages(check_program(route(decision, g), "1f1b"))
    assert program.forward_only == (0, 1) and program.unsummed == unsummed_stages(decision, g) == (1,)
    assert [str(a) for a in program.order if a.kind in "ROT"] == ["0R", "2R", "2O"]


def test_an_encoder_that_learns_keeps_the_backward_of_a_frozen_decoder() -> None:
    g = graph("e +p <- x; f- *q <- y; d *r <- e f; l <- d")
    decision = decided(g, "e | f | d | l")
    assert [stage.forward_only for stage in decision.stages] == [False, True, False, False]
    program = check_program(route(decision, g), "1f1b")
    assert [str(a) for a in program.order if a.stage == 1] == ["1F0", "1SF0>2", "1F1", "1SF1>2"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("0F0 0SF0>1 0B0 1F0 1B0 0A 1O", "stage 0 has no backward"),
        ("0F0 0SF0>1 1F0 1B0 0A 0O 1O", "no optimizer step"),
        ("1F0 1B0 0A 1O", "before it can have received"),
        ("0F0 0SF0>1 1F0 0A 1B0 1O", "before the last backward"),
    ],
)
def test_a_wrong_program_is_refused(order: str, words: str) -> None:
    g = frozen(graph("a +p <- x; b +q <- a"), 1)
    program = route(decided(g, "a | b", micros=1), g)
    with pytest.raises(ProgramError, match=words):
        check_program(replace(program, order=parse_actions(order)), "1f1b")


def test_a_stage_that_learns_cannot_be_marked() -> None:
    g = graph("a +p <- x; b <- a")
    marked = Decision(2, (Stage(("a",), (0,), forward_only=True), Stage(("b",), (1,))), (1,), "1f1b")
    with pytest.raises(PlanError, match="stage 0 is marked as forward only"):
        check_decision(marked, g)


def upstream(g: Graph, name: str) -> set[str]:
    """The op and every op that it depends on, by following reads."""
    writer, ops = g.writer(), g.op_map()
    found = {name}
    for read in ops[name].reads:
        found |= upstream(g, writer[read]) if read in writer else set()
    return found


@given(graphs(free=False), st.integers(0, 12), st.data())
def test_a_stage_is_forward_only_where_no_trained_parameter_comes_before(
    g: Graph, count: int, data: st.DataObject
) -> None:
    g = frozen(g, count)
    trained, ops = {p.name for p in g.params if p.trainable}, g.op_map()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(g.ops) - 1), max_size=3))) if len(g.ops) > 1 else []
    ends = [0, *cuts, len(g.ops)]
    stages = " | ".join(" ".join(op.name for op in g.ops[a:b]) for a, b in pairwise(ends))
    schedule = data.draw(st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-h2"]))
    decision = decided(g, stages, schedule, micros=data.draw(st.integers(1, 5)))
    for stage in decision.stages:
        learns = any(not trained.isdisjoint(ops[up].params) for name in stage.ops for up in upstream(g, name))
        assert stage.forward_only == (not learns and bool(g.learning_ops()))
    if g.learning_ops():
        program = check_messages(check_program(route(decision, g), schedule))
        whole = route(replace(decision, stages=tuple(replace(s, forward_only=False) for s in decision.stages)), g)
        event(f"{len(program.forward_only)} of {len(decision.stages)} forward only")
        kept = [a for a in whole.order if a.stage not in program.forward_only or a.kind in ("F", "SF", "A", "R")]
        assert sorted(map(str, program.order)) == sorted(
            str(a) for a in kept if a.kind != "R" or a.stage not in program.unsummed
        )


@given(st.sampled_from(["gpipe", "1f1b", "1f1b-deep", "zb-h1"]), st.integers(2, 5), st.integers(1, 12), st.data())
def test_a_frozen_stage_keeps_pace_with_the_next_one(
    schedule: str, stages: int, micros: int, data: st.DataObject
) -> None:
    """What is sent and not read yet needs memory where messages are posted by the order of the program."""
    text = "; ".join(f"v{s} +p{s} <- {f'v{s - 1}' if s else 'x'}" for s in range(stages))
    g = frozen(graph(text), data.draw(st.integers(1, stages - 1)))
    program = route(decided(g, " | ".join(f"v{s}" for s in range(stages)), schedule, micros), g)
    for stage in program.forward_only:
        way = [a.kind for a in program.order if str(a).startswith((f"{stage}SF", f"{stage + 1}F"))]
        ahead = [way[: i + 1].count("SF") - way[: i + 1].count("F") for i in range(len(way))]
        assert max(ahead) <= MESSAGES_AHEAD


def test_a_stage_that_waits_for_a_later_reader_is_let_go() -> None:
    """All micro-batches pass stage 1 before stage 3, which reads stage 0 too, begins: stage 0 cannot keep its pace."""
    g = frozen(graph("a +p <- x; b +q <- a; c +r <- b; d +s <- c a"), 1)
    decision = decided(g, "a | b | c | d", "gpipe", 6, (0, 1, 0, 1))
    check_messages(check_program(route(decision, g), "gpipe"))


# ---- planning ------------------------------------------------------------------------------------------------------


def freezing(p: Problem, random: Random) -> Problem:
    """The problem with some of its first ops frozen, but never all."""
    return replace(p, model=frozen(p.model, random.randrange(len(p.model.ops))))


@settings(max_examples=25)
@given(problems(Kind(most=5)), st.randoms(use_true_random=True))
def test_plans_of_frozen_models_against_exhaustive_search(p: Problem, random: Random) -> None:
    event(says(compare(freezing(p, random))))


@settings(max_examples=25)
@given(problems(Kind(most=7)), st.randoms(use_true_random=True))
def test_no_random_plan_of_a_frozen_model_is_faster_than_its_bound(p: Problem, random: Random) -> None:
    bounded(freezing(p, random), random, 20)


def bounded(p: Problem, random: Random, count: int) -> None:
    space = p.space
    bound, pool = lower_bound(space), list(islice(candidates(space), 20_000))
    for candidate in random.sample(pool, min(count, len(pool))):
        evaluation = evaluate(space, candidate)
        assert bound <= evaluation.step_ns or not evaluation.fits  # bounds know the memory
        assert with_forward_only(evaluation.decision, space.learning) == evaluation.decision


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_hundreds_of_frozen_problems(part: int) -> None:
    excess = []
    for i in range(100):
        random = Random(100 * part + i)
        bounded(freezing(problem(random, Kind(chain=i % 4 > 0)), random), random, 100)
        found = compare(freezing(problem(random, Kind(most=6, recompute=part == 3, replicas=part > 0)), random))
        excess += [found] if found is not None else []
    print(f"\n{len(excess)} plans, mean {sum(excess) / len(excess):.2%}, worst {max(excess):.2%}")
    assert sum(excess) / len(excess) < 0.01


@given(graphs(free=False), st.integers(0, 12), st.integers(1, 4), st.integers(1, 6))
def test_leaving_out_backwards_never_makes_a_step_longer(g: Graph, count: int, stages: int, micros: int) -> None:
    g, c = frozen(g, count), cluster(4)
    g = replace(
        g, params=tuple(replace(p, copy_bytes=p.size_bytes) for p in g.params)
    )  # cast where there is an optimizer
    ends = sorted({0, len(g.ops), *(len(g.ops) * s // stages for s in range(stages))})
    names = " | ".join(" ".join(op.name for op in g.ops[a:b]) for a, b in pairwise(ends))
    marked = decided(g, names, micros=micros)
    whole = replace(marked, stages=tuple(replace(stage, forward_only=False) for stage in marked.stages))
    estimator = Estimator(c, source(g, c).cost_model)
    steps = [estimate(d, check_program(route(d, g), "1f1b"), estimator).step_ns for d in (marked, whole)]
    assert steps[0] <= steps[1]
    for decision, taken_ns in zip((marked, whole), steps, strict=True):  # also without a program
        links = edges(decision, g)
        estimates = stage_estimates(decision, links, estimator)
        assert simulated_ns(decision, estimates, links, tied(decision, g), estimator, whole=True) == taken_ns


def test_a_frozen_stage_needs_no_gradients_state_or_activations() -> None:
    g, c = layers(4, size=100), cluster(2)
    estimator, half = Estimator(c, source(frozen(g, 9), c).cost_model), frozen(g, 9)
    names = [op.name for op in g.ops]
    decision = decided(half, f"{' '.join(names[:9])} | {' '.join(names[9:])}", micros=8)
    first, second = stage_estimates(decision, route(decision, half).edges, estimator)
    weights = sum(p.size_bytes for p in half.params if not p.trainable)
    assert first.param_bytes == weights and not first.state_bytes + first.optimizer_bytes
    assert first.bwd_ns == first.reduce_ns == first.optimizer_ns == 0 and first.live == 1
    assert second.state_bytes > 0 and second.bwd_ns > 0 and second.live == 1
    assert first.peak_bytes == weights + first.workspace_bytes + first.buffer_bytes + 8 * 8 * 2


@pytest.mark.slow
def test_the_pipeline_shrinks_and_replicas_come_as_layers_freeze() -> None:
    """What AutoPipe and AutoDP of PipeTransformer do by halving the stages."""
    machine = cluster(8, memory=400_000, bytes_per_s=10**12)
    plans = [plan_of(frozen(layers(12, size=2000), count), machine, rows=(4,) * 8, zero=None) for count in (0, 25, 45)]
    stages = [len(plan.stages) for plan in plans]
    replicas = [max(len(stage.ranks) for stage in plan.stages) for plan in plans]
    assert stages == sorted(stages, reverse=True) and stages[0] > stages[-1], stages
    assert replicas == sorted(replicas) and replicas[0] < replicas[-1], replicas
    assert plans[-1].stages[0].forward_only
    assert all(one.step_ns > two.step_ns for one, two in pairwise(plans))


def test_a_plan_with_frozen_layers_says_so() -> None:
    plan = plan_of(frozen(layers(4, size=100), 13), cluster(2), micros=8, stages=2, replicas=1)
    assert [stage.forward_only for stage in plan.stages] == [True, False]
    text = plan.explain()
    assert "learns" in text and "forward only" in text
    decision = replace(plan.decision, stages=(replace(plan.stages[0], forward_only=False), plan.stages[1]))
    assert "stage 0 is forward only: yes -> no" in diff_plans(plan, replace(plan, decision=decision))
    assert "learns" not in plan_of(layers(4, size=100), cluster(2), micros=8, stages=2, replicas=1).explain()


# ---- orders --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(cases(freezing=True))
def test_a_searched_order_of_frozen_stages_runs_and_is_never_worse_than_a_named_one(case: Case) -> None:
    found = case.search(10_000)
    program = check_messages(check_program(case.program(order=found.order), "searched"))
    assert simulate(program, case.work).step_ns == step_ns(program, case.work) == found.step_ns >= found.bound_ns
    assert simulate(program, case.work).peak_bytes == found.peak_bytes
    for name, step in found.named:
        assert found.step_ns <= step == step_ns(case.program(name), case.work)
    event(f"{len(case.shape.forward_only)} forward only")


@settings(max_examples=15)
@given(cases(2, 2, freezing=True))
def test_no_order_of_frozen_stages_beats_the_bound(case: Case) -> None:
    best = best_step_ns(Pipeline.of(case.shape, case.links, case.work, case.room_bytes))
    found = case.search()
    assert best is not None and found.bound_ns <= best <= found.step_ns

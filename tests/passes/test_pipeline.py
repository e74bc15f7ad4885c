"""The whole compiler on graphs without a model: what it returns, refuses and says."""

from __future__ import annotations

import pytest
from graphs import cluster, clusters, graph, graphs, layers
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.cluster import Cluster
from autopart.ir.errors import GraphError, InfeasibleError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import SCHEDULES, Plan, check
from autopart.passes.pipeline import build
from autopart.passes.route import route
from autopart.passes.verify import forward_program, verify


def plan(
    g: Graph,
    c: Cluster,
    *,
    stages: int | None = None,
    micros: int = 4,
    schedule: str = "auto",
    cuts: tuple[str, ...] = (),
) -> Plan:
    return build(g, c, stages=stages, micro_rows=(1,) * micros, schedule=schedule, cuts=cuts, torch_version="2")


def ops(p: Plan) -> list[str]:
    return [" ".join(stage.ops) for stage in p.stages]


@given(graphs(), st.data())
def test_any_graph_is_planned_and_its_program_proven(g: Graph, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    micros = data.draw(st.integers(1, 5))
    schedule = data.draw(st.sampled_from(("auto", *SCHEDULES)))
    p = plan(g, data.draw(clusters(world)), micros=micros, schedule=schedule)
    check(p, g)
    program = verify(route(p, g), p.schedule)
    verify(forward_program(program), p.schedule, backward=False)
    place = {op.name: i for i, op in enumerate(g.ops)}
    for stage in p.stages:
        assert list(stage.ops) == sorted(stage.ops, key=place.__getitem__)
    assert len(p.stages) <= world and (len(p.stages) == world or p.notes)
    assert p.step_ns >= max(e.fwd_ns + e.bwd_ns for e in p.estimates) * micros
    assert 0 <= p.bubble < 1


def test_same_request_gives_the_same_plan() -> None:
    assert plan(layers(6), cluster(4)).digest() == plan(layers(6), cluster(4)).digest()


def test_layers_are_cut_between_layers() -> None:
    p = plan(layers(8), cluster(2), micros=8)
    assert p.stages[1].ops[0] == "n4"
    assert [stage.ranks for stage in p.stages] == [(0,), (1,)]
    assert p.graph_digest == layers(8).shape_digest()


def test_clones_stand_in_each_stage_that_needs_them() -> None:
    g = graph("mask-; a:9 <- x mask; b:9 <- a; c:9 <- b mask; d:9 <- c")
    assert ops(plan(g, cluster(2))) == ["mask a b", "mask c d"]
    assert ops(plan(g, cluster(4))) == ["mask a", "b", "mask c", "d"]


def test_cuts_say_where_stages_begin() -> None:
    p = plan(layers(8), cluster(4), cuts=("layers.1", "head"))
    assert [stage.ops[0] for stage in p.stages] == ["embed", "n1", "loss"]
    assert p.notes == ("1 of 4 devices idle: 3 stages were asked for",)


def test_one_stage_has_no_messages() -> None:
    p = plan(layers(2), cluster(1), micros=2)
    assert str(route(p, layers(2))) == "0F0 0B0 0F1 0B1" and p.bubble == 0 and p.notes == ()


def test_devices_beyond_the_blocks_idle_and_are_noted() -> None:
    p = plan(graph("a:1 <- x; b:1 <- a"), cluster(5))
    assert len(p.stages) == 2 and p.world == 5
    assert p.notes == ("3 of 5 devices idle: the model has only 2 blocks",)
    assert len(route(p, graph("a:1 <- x; b:1 <- a")).ranks) == 5


def test_auto_takes_the_faster_and_1f1b_on_a_tie() -> None:
    free_links = graph("; ".join(f"v{i}:3 #0 <- {f'v{i - 1}' if i else 'x'}" for i in range(4)), input_bytes=0)
    assert plan(free_links, cluster(4)).schedule == "1f1b"
    slow_links = graph("; ".join(f"v{i}:3 #4 <- {f'v{i - 1}' if i else 'x'}" for i in range(4)))
    each = {name: plan(slow_links, cluster(4), schedule=name).step_ns for name in SCHEDULES}
    assert plan(slow_links, cluster(4)).step_ns == min(each.values())


def test_auto_falls_back_when_gpipe_does_not_fit() -> None:
    g = graph("a:1 ^100 #4 <- x; b:1 ^100 #0 <- a", input_bytes=0)
    assert plan(g, cluster(2, memory=(200, 104)), micros=8).schedule == "1f1b"
    with pytest.raises(InfeasibleError, match="stage 1 of 2"):
        plan(g, cluster(2, memory=(200, 104)), micros=8, schedule="gpipe")


def test_estimates_add_up_to_the_graph() -> None:
    g = layers(4)
    p = plan(g, cluster(2))
    assert sum(e.fwd_ns for e in p.estimates) == sum(op.cost.fwd_ns for op in g.ops)
    assert sum(e.param_bytes for e in p.estimates) == sum(q.size_bytes for q in g.params)
    assert [e.state_bytes for e in p.estimates] == [3 * e.param_bytes for e in p.estimates]
    assert p.estimates[0].out_bytes == p.estimates[1].in_bytes == 8 + 8  # the stream and the labels


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": 9}, "9 stages need 9 devices.*has 4"),
        ({"stages": 0}, "stages=0"),
        ({"schedule": "zigzag"}, r"zigzag(.|\n)*auto, 1f1b, gpipe"),
        ({"cuts": ("layers.1",), "stages": 3}, "1 cuts make 2 stages, but stages=3"),
        ({"cuts": ("layer.1",)}, r"'layer\.1'(.|\n)*layers\.1"),
        ({"cuts": ("layers.0", "layers.1", "head", "embed", "x")}, "6 stages need 6 devices"),
        ({"micros": 0}, "micro-batches"),
    ],
)
def test_bad_option_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan(layers(3), cluster(4), **options)  # type: ignore[arg-type]


def test_more_stages_than_blocks_says_both_numbers() -> None:
    with pytest.raises(UsageError, match="3 stages asked for, but the model has only 2 blocks"):
        plan(graph("a <- x; b <- a"), cluster(4), stages=3)


def test_uneven_micro_batches_differ_by_one_row_at_most() -> None:
    assert build(
        layers(2), cluster(2), stages=2, micro_rows=(4, 4, 3, 3), schedule="1f1b", torch_version=""
    ).micro_rows == (4, 4, 3, 3)
    with pytest.raises(UsageError, match=r"\[4, 2\]"):
        build(layers(2), cluster(2), stages=2, micro_rows=(4, 2), schedule="1f1b", torch_version="")


def test_broken_graph_is_our_bug_and_said_so() -> None:
    g = layers(1)
    with pytest.raises(GraphError):
        plan(Graph(1, g.values, g.params, g.ops[::-1], g.inputs, g.outputs), cluster(2))

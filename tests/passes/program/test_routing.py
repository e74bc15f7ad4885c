"""Routing: drawn programs, and a play of the program with numbers instead of tensors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster, graph, graphs, plan_of
from support.languages.parts import parse_actions, parts_text

from autopart.ir.actions import SEND, TIED, Action
from autopart.ir.errors import PlanError, ProgramError, UsageError
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Edge, Program
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import edges, route, tied
from autopart.passes.program.schedules import find, register, worker_orders
from autopart.passes.program.verify import check_program


def plan(stages: str, *, micros: int = 2, schedule: str = "1f1b", world: int = 0) -> Decision:
    """`a b | c`: the ops of each stage, on ranks 0, 1, ..."""
    rows = [tuple(names.split()) for names in stages.split("|")]
    placed = tuple(Stage(names, (s,)) for s, names in enumerate(rows))
    return Decision(world or len(rows), placed, (1,) * micros, schedule)


def test_chain_of_two_stages_as_drawn() -> None:
    program = route(plan("a | b"), graph("a <- x; b <- a"))
    assert str(program) == "0F0 0SF0>1 0F1 0SF1>1 1F0 1B0 1SB0>0 0B0 1F1 1B1 1SB1>0 0B1 0A 0O 1O"
    assert parts_text(program) == "\n".join(
        [
            "0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0A 0O",
            "1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0 0A 1O",
        ]
    )
    assert program.edges == (Edge(0, 1, ("a",), ("a",)),)


def test_skip_goes_straight_to_the_stage_that_reads_it() -> None:
    g = graph("a <- x; b <- a; c <- b; d <- c a")
    assert edges(plan("a | b | c | d"), g) == (
        Edge(0, 1, ("a",), ("a",)),
        Edge(0, 3, ("a",), ("a",)),
        Edge(1, 2, ("b",), ("b",)),
        Edge(2, 3, ("c",), ("c",)),
    )
    program = check_program(route(plan("a | b | c | d", micros=1), g), "1f1b")
    assert parts_text(program).splitlines()[0] == "0F0 0SF0>1 0SF0>3 0RB0<1 0RB0<3 0B0 0A 0O"


def test_input_read_late_comes_from_the_first_stage_without_gradient() -> None:
    g = graph("a <- x; b <- a y; c <- b y x")
    assert edges(plan("a | b | c"), g) == (
        Edge(0, 1, ("y", "a"), ("a",)),
        Edge(0, 2, ("x", "y"), ()),
        Edge(1, 2, ("b",), ("b",)),
    )
    assert "RB0<2" not in parts_text(route(plan("a | b | c"), g)).splitlines()[0]


def test_values_stand_in_order_of_inputs_then_of_writing() -> None:
    g = graph("a <- x; b <- a; c <- y; d <- c a z b y")
    assert edges(plan("a b c | d"), g)[0].values == ("y", "z", "a", "b", "c")


def test_value_of_a_clone_is_not_sent() -> None:
    g = graph("m-; a <- x m; b <- a m")
    assert edges(plan("m a | m b"), g) == (Edge(0, 1, ("a",), ("a",)),)
    assert edges(plan("m a | b"), g) == (Edge(0, 1, ("m", "a"), ("a",)),)


def test_value_without_gradient_sends_nothing_back() -> None:
    g = graph("a- <- x; b <- a")
    assert parts_text(route(plan("a | b", micros=1), g)) == "0F0 0SF0>1 0B0 0A 0O\n1RF0<0 1F0 1B0 0A 1O"


def test_stages_that_share_a_parameter_sum_last() -> None:
    g = graph("a +w <- x; b <- a; c +w +v <- b")
    p = plan("a | b | c", micros=1)
    assert tied(p, g) == (("w", (0, 2)),)
    assert str(route(p, g)).endswith("0B0 0T 2T 0A 0O 1O 2O")


def test_frozen_parameter_in_two_stages_is_not_summed() -> None:
    assert tied(plan("a | b"), graph("a ~c <- x; b ~c <- a")) == ()


def test_stages_may_stand_on_any_ranks() -> None:
    p = Decision(4, (Stage(("a",), (3,)), Stage(("b",), (1,))), (1,), "gpipe")
    program = check_program(route(p, graph("a <- x; b <- a")), "gpipe")
    assert program.stage_ranks == ((3,), (1,)) and program.part(0) == program.part(2) == parse_actions("0A")


@pytest.mark.parametrize(
    ("stages", "text", "line"),
    [
        ("b | a", "flow back", "a <- x; b <- a"),
        ("a | a b", "is in stages 0 and 1", "a <- x; b <- a"),
        ("a | a b", "is in stages 0 and 1", "a- ! <- x; b <- a"),
        ("a | a b", "is in stages 0 and 1", "a- ~run =run <- x; b <- a"),
    ],
)
def test_plan_that_would_not_be_exact_is_refused(stages: str, text: str, line: str) -> None:
    with pytest.raises(PlanError, match=text):
        route(plan(stages), graph(line))


# ---- with numbers -----------------------------------------------------------------------------------------------


def weight(op: Op, name: str) -> int:
    """The factor with which an op takes in what it reads or its parameter: different for each pair."""
    return sum((i + 1) * ord(c) for i, c in enumerate(f"{op.name}/{name}")) % 97 + 1


def forward(ops: list[Op], values: dict[str, int], params: dict[str, int]) -> None:
    for op in ops:
        total = sum(weight(op, r) * values[r] for r in op.reads) + sum(weight(op, p) * params[p] for p in op.params)
        values.update((w, total + 1) for w in op.writes)


def backward(ops: list[Op], grads: dict[str, int], through: set[str], params: dict[str, int]) -> None:
    """Gradients of linear ops, added into `grads` (of values in `through`) and `params`."""
    for op in reversed(ops):
        for w in op.writes:
            for r in set(op.reads) & through:
                grads[r] = grads.get(r, 0) + op.reads.count(r) * weight(op, r) * grads.get(w, 0)
            for p in op.params:
                params[p] = params.get(p, 0) + weight(op, p) * grads.get(w, 0)


class Play:
    """One play of a program: every value, gradient and message is an integer."""

    def __init__(self, program: Program, p: Decision, g: Graph) -> None:
        ops = g.op_map()
        self.program, self.g = program, g
        self.own = [[ops[name] for name in stage.ops] for stage in p.stages]
        self.edge = {(e.src, e.dst): e for e in program.edges}
        self.values = [[{} if s else start(g, i) for i in range(program.micros)] for s in range(len(p.stages))]
        self.grads: list[list[dict[str, int]]] = [[{} for _ in range(program.micros)] for _ in p.stages]
        self.learned: list[dict[str, int]] = [{} for _ in p.stages]
        self.channels: dict[tuple[int, int], list[dict[str, int]]] = {}

    def run(self) -> None:
        parts = self.program.parts(range(self.program.world))
        done = [0] * len(parts)
        for _ in range(sum(map(len, parts))):
            for rank, actions in enumerate(parts):
                while done[rank] < len(actions) and self.act(actions[done[rank]]):
                    done[rank] += 1
        assert done == [len(actions) for actions in parts]

    def act(self, a: Action) -> bool:
        """Do it, or say False when its message is not there yet."""
        values, grads = self.values[a.stage][a.micro], self.grads[a.stage][a.micro]
        if a.kind == "F":
            forward(self.own[a.stage], values, params_of(self.g))
        elif a.kind == "B":
            if self.g.outputs[0] in {w for op in self.own[a.stage] for w in op.writes}:
                grads[self.g.outputs[0]] = 1
            backward(self.own[a.stage], grads, carried(self.g), self.learned[a.stage])
        elif a.peer is not None:
            return self.send(a, a.peer) if a.is_a.role == SEND else self.receive(a, a.peer)
        return True

    def send(self, a: Action, peer: int) -> bool:
        if a.kind == "SF":
            message = {v: self.values[a.stage][a.micro][v] for v in self.edge[a.stage, peer].values}
        else:
            message = {v: self.grads[a.stage][a.micro].get(v, 0) for v in self.edge[peer, a.stage].grads}
        self.channels.setdefault((a.stage, peer), []).append(message)
        return True

    def receive(self, a: Action, peer: int) -> bool:
        if not self.channels.get((peer, a.stage)):
            return False
        message = self.channels[peer, a.stage].pop(0)
        held = self.values[a.stage][a.micro] if a.kind == "RF" else self.grads[a.stage][a.micro]
        for name, number in message.items():
            held[name] = number + (held.get(name, 0) if a.kind == "RB" else 0)
        return True

    def outputs(self, micro: int) -> dict[str, int]:
        home = {w: s for s, ops in enumerate(self.own) for op in ops for w in op.writes}
        return {o: self.values[home[o]][micro][o] for o in self.g.outputs}

    def gradients(self) -> dict[str, int]:
        """Of the trainable parameters; only those that the program calls tied may come from several stages."""
        tied_to = dict(self.program.tied)
        total = {}
        for q in (q for q in self.g.params if q.trainable):
            parts = {s: part[q.name] for s, part in enumerate(self.learned) if q.name in part}
            assert len(parts) < 2 or tuple(parts) == tied_to[q.name]
            total[q.name] = sum(parts.values())
        return total


def carried(g: Graph) -> set[str]:
    return {v.name for v in g.values if v.grad and v.name not in g.inputs}


def params_of(g: Graph) -> dict[str, int]:
    return {q.name: 3 + i for i, q in enumerate(g.params)}


def start(g: Graph, micro: int) -> dict[str, int]:
    return {name: 7 * micro + k + 1 for k, name in enumerate(g.inputs)}


def most_stages(g: Graph, stages: int, micros: int, schedule: str) -> Decision:
    """So many stages, or as many as the graph has blocks: left alone, the planner takes few for so little work."""
    while True:
        try:
            return plan_of(g, cluster(stages), stages=stages, micros=micros, schedule=schedule).decision
        except UsageError:
            stages -= 1


@given(graphs(least=2), st.data())
def test_split_and_routed_program_computes_what_the_graph_does(g: Graph, data: st.DataObject) -> None:
    schedule, micros = data.draw(st.sampled_from(SCHEDULES)), data.draw(st.integers(1, 4))
    p = most_stages(g, data.draw(st.integers(1, 5)), micros, schedule)
    play = Play(route(p, g), p, g)
    play.run()
    expected: dict[str, int] = {}
    for i in range(micros):
        values = start(g, i)
        forward(list(g.ops), values, params_of(g))
        assert play.outputs(i) == {o: values[o] for o in g.outputs}
        backward(list(g.ops), {g.outputs[0]: 1}, carried(g), expected)
    assert play.gradients() == {q.name: expected.get(q.name, 0) for q in g.params if q.trainable}


@given(graphs(least=2), st.sampled_from(SCHEDULES), st.integers(1, 4))
def test_program_prints_and_parses_back(g: Graph, schedule: str, micros: int) -> None:
    p = most_stages(g, 2, micros, schedule)
    program = route(p, g)
    assert parse_actions(str(program)) == program.order
    assert parse_actions(parts_text(program)) == sum(program.parts(range(program.world)), ())


# ---- what each rank plays ------------------------------------------------------------------------------------------


def drawn_parts(p: Decision, g: Graph) -> list[list[str]]:
    """By definition: receives right before the compute that needs them, sends right behind, peers ascending."""
    links = edges(p, g)
    schedule, stages, micros = find(p.schedule), len(p.stages), len(p.micro_rows)
    parts: list[list[str]] = [[] for _ in range(p.world)]
    for turns in worker_orders(schedule, Shape(stages, micros)):
        for kind, s, i in turns:
            if kind != "F" and p.stages[s].forward_only:
                continue
            into = (
                [e.src for e in links if e.dst == s]
                if kind == "F"
                else [e.dst for e in links if e.src == s and e.grads]
            )
            out = (
                [e.dst for e in links if e.src == s]
                if kind == "F"
                else [e.src for e in links if e.dst == s and e.grads]
            )
            for rank in p.stages[s].ranks:
                parts[rank] += [f"{s}R{kind}{i}<{peer}" for peer in sorted(into)]
                parts[rank] += [f"{s}{kind}{i}", *(f"{s}S{kind}{i}>{peer}" for peer in sorted(out))]
    for s, stage in enumerate(p.stages):
        for rank in stage.ranks:
            parts[rank] += [f"{s}T"] * any(s in users for _, users in tied(p, g))
            parts[rank] += [f"{s}R"] * (len(stage.ranks) > 1)
    for part in parts:
        part += ["0A"] * (p.world > 1)
    for s, stage in enumerate(p.stages):
        for rank in stage.ranks if not stage.forward_only else ():
            parts[rank].append(f"{s}O")
    return parts


@settings(max_examples=25)
@given(graphs(least=3), st.data())
def test_each_rank_plays_what_is_drawn(g: Graph, data: st.DataObject) -> None:
    micros, schedule = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(SCHEDULES))
    p = most_stages(g, data.draw(st.integers(1, 5)), micros, schedule)
    assert parts_text(check_program(route(p, g), schedule)) == "\n".join(map(" ".join, drawn_parts(p, g)))


def test_replicas_play_the_same_and_sum_their_gradients() -> None:
    g = graph("a +w <- x; b <- a")
    p = Decision(3, (Stage(("a",), (0, 2)), Stage(("b",), (1,))), (2,), "1f1b")
    program = check_program(route(p, g), "1f1b")
    assert str(program) == "0F0 0SF0>1 1F0 1B0 1SB0>0 0B0 0R 0A 0O 1O"
    assert program.part(0) == program.part(2) and [str(a) for a in program.part(0)[-3:]] == ["0R", "0A", "0O"]
    send = program.order[1]
    assert [(t.src_rank, t.dst_rank, t.rows, t.of) for t in program.transfers(send)] == [
        (0, 1, (0, 1), 2),
        (2, 1, (1, 2), 2),
    ]


def test_stages_that_share_parameters_meet_side_by_side() -> None:
    g = graph("a +w <- x; b +v <- a; c +v <- b; d +w <- c")
    program = check_program(route(plan("a | b | c | d", micros=1), g), "1f1b")
    assert program.groups(TIED) == ((0, 3), (1, 2))
    assert str(program).endswith("0T 3T 1T 2T 0A 0O 1O 2O 3O")


def test_several_stages_on_a_rank_are_one_worker() -> None:
    g = graph("a <- x; b <- a; c <- b; d <- c")
    looped = register(
        lambda stages, micros: [
            [f"{s}F{i}" for i in range(micros) for s in range(w, stages, 2)]
            + [f"{s}B{i}" for i in range(micros) for s in reversed(range(w, stages, 2))]
            for w in range(2)
        ],
        name="looped",
    )
    p = Decision(2, tuple(Stage((name,), (s % 2,)) for s, name in enumerate("abcd")), (1, 1), looped.name)
    program = check_program(route(p, g), looped.name)
    assert parts_text(program).splitlines()[0] == (
        "0F0 0SF0>1 2RF0<1 2F0 2SF0>3 0F1 0SF1>1 2RF1<1 2F1 2SF1>3 "
        "2RB0<3 2B0 2SB0>1 0RB0<1 0B0 2RB1<3 2B1 2SB1>1 0RB1<1 0B1 0A 0O 2O"
    )


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 1, 2, 3), "runs stages 0 and 2 on one worker.*\n.*ranks"),
        ((0, 0, 0, 0), "has stage 1 on worker 1"),
    ],
)
def test_workers_of_a_schedule_need_ranks_that_fit(ranks: tuple[int, ...], message: str) -> None:
    g = graph("a <- x; b <- a; c <- b; d <- c")
    register(
        lambda stages, micros: [[f"{s}F0" for s in range(w, 4, 2)] + [f"{s}B0" for s in (w + 2, w)] for w in range(2)],
        name="two",
    )
    p = Decision(4, tuple(Stage((name,), (rank,)) for name, rank in zip("abcd", ranks, strict=True)), (1,), "two")
    with pytest.raises(ProgramError, match=message):
        route(p, g)

"""Graphs and decisions print as text and parse back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import graphs, layers
from support.languages.parse import parse_decision, parse_graph
from support.languages.plans import decisions
from support.languages.text import decision_text, graph_text
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.errors import GraphError, PlanError
from autopart.ir.graph import Cost, Graph, Op, Param, Size, Value, check
from autopart.ir.plan import Decision, Stage

SMALL = st.integers(0, 30)
KINDS = st.sampled_from([("param", True), ("param", False), ("buffer", False), ("constant", False)])
DTYPES = st.sampled_from(["uint8", "float32"])


@st.composite
def values(draw: st.DrawFn, name: str, *, grad: bool) -> Value:
    """A value of any size, with or without an axis of rows."""
    size = draw(SMALL)
    if draw(st.booleans()):
        return Value(name, (size,), "uint8", size, grad)
    shape = tuple(draw(st.lists(SMALL, max_size=3)))
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    return Value(name, shape, draw(DTYPES), size, grad, axis)


@st.composite
def params(draw: st.DrawFn, name: str, owner: str | None) -> Param:
    """A parameter of any kind, tied to its owner if there is one."""
    kind, trainable = draw(KINDS)
    shape = tuple(draw(st.sampled_from([[1], [], [2, 3]])))
    return Param(name, shape, draw(DTYPES), draw(SMALL), trainable, kind, owner, draw(st.sampled_from([0, 0, 4])))


@st.composite
def covered_graphs(draw: st.DrawFn) -> Graph:
    """Any valid graph that the language covers: no arguments and no source lines."""
    inputs = tuple(f"x{i}" for i in range(draw(st.integers(0, 3))))
    owned = [f"p{i}.w" for i in range(draw(st.integers(0, 3)))]
    tied = [f"t{i}" for i in range(draw(st.integers(0, 1)))] if owned else []
    held = [draw(values(name, grad=False)) for name in inputs]
    ops: list[Op] = []
    for i in range(draw(st.integers(1, 5))):
        names = draw(st.sampled_from([(f"v{i}",), (f"v{i}", f"w{i}"), (f"w{i}", f"u{i}"), ()]))
        reads = draw(st.lists(st.sampled_from([v.name for v in held]), max_size=2, unique=True)) if held else []
        alike = draw(values("", grad=draw(st.booleans())))
        some = draw(st.booleans())
        ops.append(
            Op(
                name=f"v{i}",
                target=draw(st.sampled_from(["layer", "aten.mm.default"])),
                reads=tuple(reads),
                writes=names,
                params=tuple(draw(st.lists(st.sampled_from(owned), max_size=2, unique=True))) if owned else (),
                module=draw(st.sampled_from(["", "enc.0"])),
                random=draw(st.booleans()),
                parts=draw(st.sampled_from([(f"v{i}",), (), ("a", "b")])),
                cost=Cost(*(draw(SMALL) for _ in range(5))),
            )
        )
        held += [replace(alike, name=n) if some else draw(values(n, grad=draw(st.booleans()))) for n in names]
    known = [v.name for v in held]
    every = draw(st.permutations([draw(params(n, None)) for n in owned] + [draw(params(n, owned[0])) for n in tied]))
    updates: st.SearchStrategy[list[tuple[str, str]]] = st.just([])
    if owned and known:
        pairs = st.tuples(st.sampled_from(owned), st.sampled_from(known))
        updates = st.lists(pairs, max_size=2, unique_by=lambda pair: pair[0])
    return check(
        Graph(
            size=Size(draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 4))),
            values=tuple(held),
            params=tuple(every),
            ops=tuple(ops),
            inputs=inputs,
            outputs=tuple(draw(st.lists(st.sampled_from(known), max_size=2, unique=True))) if known else (),
            updates=tuple(draw(updates)),
        )
    )


@given(covered_graphs())
def test_a_graph_prints_and_parses_back(g: Graph) -> None:
    assert parse_graph(graph_text(g)) == g


@given(graphs())
def test_a_graph_written_as_text_prints_and_parses_back(g: Graph) -> None:
    assert parse_graph(graph_text(g)) == g
    assert parse_graph(graph_text(g).replace("\n", "; ")) == g


def test_a_captured_graph_prints_and_parses_back_but_for_arguments_and_source_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    batch = flatten((torch.randn(4, 4), torch.randint(2, (4,))), with_target=True)
    g = capture(model, batch, loss_fn=nn.functional.cross_entropy).graph
    bare = replace(g, ops=tuple(replace(op, attrs=(), where="") for op in g.ops))
    assert g.updates and any(op.random for op in g.ops)
    assert parse_graph(graph_text(g)) == bare


def test_the_text_of_a_graph_says_only_what_is_not_usual() -> None:
    g = parse_graph("a:3 +w:40 @enc.0 <- x; b,c:5/7 #64 <- a y; m- <- y; c2 <- c m; -> c2 m")
    assert graph_text(g).splitlines() == [
        "<- x y",
        "a:3 +w:40 @enc.0 <- x",
        "b,c:5/7 #64 <- a y",
        "m- <- y",
        "c2 <- c m",
        "-> c2 m",
    ]
    assert graph_text(layers(1)).splitlines()[1] == "embed:1 +embed.w:32 @embed <- ids"


def test_sizes_and_rows_are_said_where_they_are_not_plain_bytes() -> None:
    g = parse_graph("rows 2; <- x #24:float32[2*,3]; a #8:float32[2*] +w:12:float32[3] (aten.mv.default) |6 <- x")
    x, a = g.values
    assert (g.rows, x.shape, x.rows_axis, a.shape, a.size_bytes) == (2, (2, 3), 0, (2,), 8)
    assert g.params == (Param("w", (3,), "float32", 12, True),)
    assert g.ops[0].target == "aten.mv.default" and g.ops[0].cost.flops == 6
    assert parse_graph(graph_text(g)) == g


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a:fast <- x", "not a name with times"),
        ("a ?b <- x", "unknown mark '?b'"),
        ("a #big <- x", "'big' is not a size"),
        ("a ^much <- x", "invalid literal"),
        ("a <- x; a <- x", "written a second time"),
        ("a +w; b ~w <- a", "declared otherwise before"),
        ("a +w:8; b +w:9 <- a", "declared otherwise before"),
        ("a; =run", "unpack"),
        ("a; = a", "'~' is not a parameter"),
        ("a,,b <- x", "is not the name of a value"),
        ("a <- x -> -", "is not the name of a value"),
        ("a:" + "1" * 5000 + " <- x", "Exceeds the limit"),
    ],
)
def test_what_is_not_a_statement_is_refused(text: str, why: str) -> None:
    with pytest.raises(GraphError, match="is not a statement of a graph") as caught:
        parse_graph(text)
    assert why in caught.value.why


def test_a_graph_that_breaks_the_rules_is_refused() -> None:
    with pytest.raises(GraphError, match="output z is never written"):
        parse_graph("a <- x; -> z")


# ---- decisions -----------------------------------------------------------------------------------------------------

NAMES = st.text("abc._0:-[]", min_size=1, max_size=4)


@given(decisions(NAMES))
def test_a_decision_prints_and_parses_back(decision: Decision) -> None:
    assert parse_decision(decision_text(decision)) == decision


def test_the_text_of_a_decision_has_a_line_for_each_stage_and_recomputed_group() -> None:
    stages = (Stage(("a", "b", "c"), (0, 1), (("a", "b"), ("c",))), Stage(("d",), (2,)))
    decision = Decision(4, stages, (4, 4, 3), "1f1b")
    assert decision_text(decision).splitlines() == [
        "schedule 1f1b, micro-batches of 4 4 3 rows, world 4",
        "stage on 0 1: a b c",
        "  recompute a b",
        "  recompute c",
        "stage on 2: d",
    ]
    assert parse_decision(decision_text(decision).replace("\n", ";")) == decision


@pytest.mark.parametrize(
    "text",
    [
        "",
        "stage on 0: a",
        "schedule 1f1b, micro-batches of 1 rows, world 1; recompute a",
        "schedule x; stage on 0: a",
        f"schedule 1f1b, micro-batches of 1 rows, world {'1' * 5000}",
        f"schedule 1f1b, micro-batches of {'1' * 5000} rows, world 1",
        "schedule 1f1b, micro-batches of 1 rows, world 1; stage on 1-: a",
    ],
)
def test_what_is_not_a_decision_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_decision(text)

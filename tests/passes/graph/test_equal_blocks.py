"""Equal blocks are looked at a few times: the rule finds for all of a graph what it finds by looking at each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Literal, Op, Param, Size, Value
from autopart.ir.graph import check as check_graph
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.choice import choose, chosen_op_by_op
from autopart.passes.shards.equal_blocks import KEPT, counted, shortened

ROWS, TOKENS, WIDTH, HEADS = 2, 8, 16, 4
PIECES = ("mlp", "gated", "attention", "norm", "product", "masked", "tied", "skip")


@dataclass
class Writer:
    """Writes ops of a graph; `x` is the stream that pieces read and add to."""

    values: list[Value] = field(default_factory=list)
    params: dict[str, Param] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    x: str = "x"
    first: str = "x"

    def value(self, name: str, shape: tuple[int, ...]) -> str:
        self.shapes[name] = shape
        self.values.append(Value(name, shape, "float32", 4 * math.prod(shape), grad=name != "x"))
        return name

    def param(self, shape: tuple[int, ...], name: str = "") -> str:
        name = name or f"p{len(self.params)}"
        self.params[name] = Param(name, shape, "float32", 4 * math.prod(shape), trainable=True)
        return name

    def op(self, target: str, shape: tuple[int, ...], /, **given: Literal) -> str:
        """Write an op; names of values and parameters are given with "%"."""
        used = [v[1:] for v in given.values() if isinstance(v, str) and v[:1] == "%"]
        name = self.value(f"v{len(self.ops)}", shape)
        reads = tuple(dict.fromkeys(n for n in used if n not in self.params))
        params = tuple(dict.fromkeys(n for n in used if n in self.params))
        self.ops.append(Op(name, f"aten.{target}.default", reads, (name,), params, tuple(given.items())))
        return name

    def linear(self, x: str, out: int, weight: str = "") -> str:
        shape = self.shapes[x]
        return self.op("linear", (*shape[:-1], out), input=f"%{x}", weight=f"%{weight or self.param((out, shape[-1]))}")

    def same(self, target: str, x: str, /, **given: Literal) -> str:
        return self.op(target, self.shapes[x], self=f"%{x}", **given)

    def heads(self, x: str) -> str:
        split = self.op("view", (ROWS, TOKENS, HEADS, WIDTH // HEADS), self=f"%{x}", size=(ROWS, TOKENS, HEADS, -1))
        return self.op("transpose", (ROWS, HEADS, TOKENS, WIDTH // HEADS), self=f"%{split}", dim0=1, dim1=2)

    def added(self, y: str) -> None:
        self.x = self.same("add", self.x, other=f"%{y}")

    def piece(self, kind: str, wide: int) -> None:
        """Write one piece of a block.  wide: its hidden axis."""
        x = self.x
        if kind == "mlp":
            self.added(self.linear(self.same("gelu", self.linear(x, wide)), WIDTH))
        elif kind == "gated":
            gate = self.same("silu", self.linear(x, wide))
            self.added(self.linear(self.same("mul", gate, other=f"%{self.linear(x, wide)}"), WIDTH))
        elif kind == "attention":
            q, k, v = (self.heads(self.linear(x, WIDTH)) for _ in range(3))
            turned = self.op("transpose", (ROWS, HEADS, WIDTH // HEADS, TOKENS), self=f"%{k}", dim0=2, dim1=3)
            scores = self.op("matmul", (ROWS, HEADS, TOKENS, TOKENS), self=f"%{q}", other=f"%{turned}")
            mixed = self.op("matmul", self.shapes[v], self=f"%{self.same('softmax', scores, dim=-1)}", other=f"%{v}")
            back = self.op("transpose", (ROWS, TOKENS, HEADS, WIDTH // HEADS), self=f"%{mixed}", dim0=1, dim1=2)
            joined = self.op("reshape", (ROWS, TOKENS, WIDTH), self=f"%{back}", shape=(ROWS, TOKENS, WIDTH))
            self.added(self.linear(joined, WIDTH))
        elif kind == "norm":
            given = {"input": f"%{x}", "normalized_shape": (WIDTH,), "weight": f"%{self.param((WIDTH,))}"}
            self.x = self.op("layer_norm", self.shapes[x], **given)
        elif kind == "product":
            self.x = self.linear(x, WIDTH)
        elif kind == "masked":
            self.added(self.first)
        elif kind == "tied":
            name = next((name for name in self.params if name == "tied"), "") or self.param((WIDTH, WIDTH), "tied")
            self.added(self.linear(self.same("relu", self.linear(x, WIDTH, name)), WIDTH, name))
        else:  # reads what lies some ops back
            near = [v for v in list(self.shapes)[-9:] if self.shapes[v] == self.shapes[x]]
            self.added(near[0])

    def graph(self) -> Graph:
        loss = self.op("sum", (), self=f"%{self.x}")
        return check_graph(
            Graph(Size(ROWS), tuple(self.values), tuple(self.params.values()), tuple(self.ops), ("x",), (loss,))
        )


Rows = list[tuple[list[str], int, int]]
BLOCK = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3)
ROW = st.tuples(BLOCK, st.integers(1, 8), st.sampled_from([16, 24, 32]))


def written(rows: Rows) -> Graph:
    """Return the graph of rows of equal blocks: (pieces of a block, blocks, hidden axis)."""
    writer = Writer()
    writer.value("x", (ROWS, TOKENS, WIDTH))
    writer.x = writer.first = writer.linear("x", WIDTH)
    for pieces, count, wide in rows:
        for _ in range(count):
            for kind in pieces:
                writer.piece(kind, wide)
    return writer.graph()


def ways(found: Assignment) -> dict[str, object]:
    """Return how each op runs, without the numbers of factors."""
    return {name: (each.reads, each.writes, each.how) for name, each in found.strategies.items()}


def require_equal(graph: Graph, shards: int) -> None:
    try:
        plain = chosen_op_by_op(graph, shards)
    except RefusedError as refusal:
        with pytest.raises(RefusedError) as again:
            choose(graph, shards)
        assert str(again.value) == str(refusal)
        return
    found = choose(graph, shards)
    assert dict(found.states) == dict(plain.states)
    assert ways(found) == ways(plain)


DRAWN = given(st.lists(ROW, min_size=1, max_size=3), st.sampled_from([2, 4]))


@DRAWN
@settings(max_examples=50)
def test_the_rule_finds_for_equal_blocks_what_it_finds_op_by_op(rows: Rows, shards: int) -> None:
    require_equal(written(rows), shards)


@pytest.mark.slow
@DRAWN
@settings(max_examples=500)
def test_the_rule_finds_for_hundreds_of_equal_blocks_what_it_finds_op_by_op(rows: Rows, shards: int) -> None:
    require_equal(written(rows), shards)


def test_rows_of_blocks_are_shortened_one_after_the_other() -> None:
    graph = written([(["attention", "mlp"], 9, 32), (["norm", "gated"], 12, 24)])
    short, left_out = shortened(graph)
    check_graph(short)
    assert [len(each.ops) for each in left_out] == [(9 - KEPT) * 21, (12 - KEPT) * 7]
    assert len(short.ops) == len(graph.ops) - sum(len(each.ops) for each in left_out)
    times = counted(graph, left_out)
    assert times.total() == len(graph.ops) and times.keys() == {op.name for op in short.ops}


def test_blocks_that_something_else_reads_from_are_all_looked_at() -> None:
    writer = Writer()
    writer.value("x", (ROWS, TOKENS, WIDTH))
    writer.x = writer.linear("x", WIDTH)
    between = []
    for _ in range(9):
        writer.piece("mlp", 32)
        between.append(writer.x)
    for name in between:
        writer.added(name)
    graph = writer.graph()
    assert shortened(graph) == (graph, [])
    require_equal(graph, 2)


SMALL = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=6, n_head=4, n_positions=16, **SMALL)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=6, num_heads=4, decoder_start_token_id=0, **SMALL)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_layers_are_divided_as_op_by_op(name: str) -> None:
    with torch.device("meta"):
        model, ids = MODELS[name]().eval(), torch.zeros((2, 16), dtype=torch.long)
    graph = capture(model, flatten({"input_ids": ids, "labels": ids})).graph
    assert shortened(graph)[1]
    require_equal(graph, 2)

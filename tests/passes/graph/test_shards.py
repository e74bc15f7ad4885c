"""Factors of axes, and the ways to run an op, against brute force over the numbers of elements."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extending.shards_in_process import captured_at
from support.models.zoo import CASES

from autopart.ir.errors import PlanError, RefusedError
from autopart.ir.graph import Graph, Op, Param, Size, Value
from autopart.passes.shards.assignment import check
from autopart.passes.shards.calls import calls_of
from autopart.passes.shards.choice import choose
from autopart.passes.shards.factors import Factors, factors_of
from autopart.passes.shards.states import CUT_KIND, State, cut
from autopart.passes.shards.strategies import NO_DIGIT, strategies, uniform

FACTORS = st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=5)


def graph_of(ops: list[Op], shapes: dict[str, tuple[int, ...]], params: dict[str, tuple[int, ...]]) -> Graph:
    values = tuple(Value(name, shape, "float32", 4 * math.prod(shape), grad=True) for name, shape in shapes.items())
    held = tuple(Param(name, shape, "float32", 4 * math.prod(shape), trainable=True) for name, shape in params.items())
    return Graph(Size(1), values, held, tuple(ops), ("x",), (ops[-1].writes[0],))


def grouped(sizes: list[int], cuts: list[bool]) -> tuple[int, ...]:
    """Multiply neighbours, but where there is a cut."""
    found = [sizes[0]]
    for size, apart in zip(sizes[1:], cuts, strict=False):
        if apart:
            found.append(size)
        else:
            found[-1] *= size
    return tuple(found)


def parts(array: np.ndarray, state: State, shards: int) -> list[np.ndarray]:
    """Return what each rank holds of an array."""
    if state.kind != CUT_KIND:
        return [array] * shards
    shape = array.shape
    view = array.reshape(*shape[: state.axis], state.before, shards, -1, *shape[state.axis + 1 :])
    local = state.local(shape, shards)
    return [np.take(view, n, state.axis + 1).reshape(local) for n in range(shards)]


@given(FACTORS, st.lists(st.booleans(), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=80)
def test_a_cut_of_a_reshape_is_the_reshape_of_the_parts(sizes: list[int], one: list[bool], other: list[bool]) -> None:
    source, target = grouped(sizes, one), grouped(sizes, other)
    op = Op("y", "aten.reshape.default", ("x",), ("y",), attrs=(("self", "%x"), ("shape", target)))
    graph = graph_of([op], {"x": source, "y": target}, {})
    factors, (call,) = factors_of(graph), calls_of(graph)
    x = np.arange(math.prod(source)).reshape(source)
    for shards in (2, 3):
        found = [each for each in strategies(call, factors, shards) if each.digit != NO_DIGIT]
        for each in found:
            mine, made = each.reads[0], each.writes[0]
            for own, expected in zip(parts(x, mine, shards), parts(x.reshape(target), made, shards), strict=True):
                assert np.array_equal(own.reshape(expected.shape), expected)
        alike = [n for n, size in enumerate(sizes) if size % shards == 0]
        edges = [{math.prod(shape[:n]) for n in range(len(shape) + 1)} for shape in (source, target)]
        both = [n for n in alike if math.prod(sizes[:n]) in edges[0] & edges[1]]
        assert len(found) >= len(both)  # a digit that begins an axis on both sides is always found


@given(st.lists(FACTORS, min_size=2, max_size=5))
@settings(max_examples=80)
def test_factors_always_multiply_to_their_axes(sides: list[list[int]]) -> None:
    factors = Factors()
    for number, sizes in enumerate(sides):
        factors.add(f"v{number}", [math.prod(sizes), *sizes])
        factors.unify(factors.of(f"v{number}", 0), factors.flat(f"v{number}")[1:])
        if number and math.prod(sizes) == math.prod(sides[number - 1]):
            factors.unify(factors.of(f"v{number}", 0), factors.of(f"v{number - 1}", 0))
    for number, sizes in enumerate(sides):
        for axis, size in enumerate([math.prod(sizes), *sizes]):
            assert math.prod(factors.size(digit) for digit in factors.of(f"v{number}", axis)) == size


def test_sections_of_unequal_length_are_not_mistaken_for_heads() -> None:
    def piece(name: str, first: int, end: int) -> Op:
        given = (("self", "%qkv"), ("dim", 1), ("start", first), ("end", end))
        return Op(name, "aten.slice.Tensor", ("qkv",), (name,), attrs=given)

    product = Op("qkv", "aten.mm.default", ("x",), ("qkv",), ("w",), (("self", "%x"), ("mat2", "%w")))
    shapes = {"x": (4, 8), "qkv": (4, 64), "q": (4, 32), "k": (4, 16), "v": (4, 16)}
    uneven = graph_of([product, piece("q", 0, 32), piece("k", 32, 48), piece("v", 48, 64)], shapes, {"w": (8, 64)})
    assert [factors_of(uneven).size(d) for d in factors_of(uneven).of("w", 1)] == [64]
    shapes = {"x": (4, 8), "qkv": (4, 48), "q": (4, 16), "k": (4, 16), "v": (4, 16)}
    even = graph_of([product, piece("q", 0, 16), piece("k", 16, 32), piece("v", 32, 48)], shapes, {"w": (8, 48)})
    found = factors_of(even)
    assert [found.size(digit) for digit in found.of("w", 1)] == [3, 16]
    assert found.of("q", 1) == found.of("v", 1) == found.of("w", 1)[1:]


@cache
def graph_of_case(name: str) -> Graph:
    case = CASES[name]
    return captured_at(case.model(dtype=torch.float64), case.data(4, torch.float64))[0].graph


def test_megatrons_cuts_are_found_without_a_name() -> None:
    gpt2, llama = graph_of_case("gpt2"), graph_of_case("llama")
    assert {n.split("h.1.")[-1]: str(s) for n, s in choose(gpt2, 2).pieces(gpt2).items() if "h.1." in n} == {
        "attn.c_attn.weight": "cut[1:3]",
        "attn.c_attn.bias": "cut[0:3]",
        "attn.c_proj.weight": "cut[0]",
        "mlp.c_fc.weight": "cut[1]",
        "mlp.c_fc.bias": "cut[0]",
        "mlp.c_proj.weight": "cut[0]",
    }
    pieces = choose(llama, 2).pieces(llama)
    assert pieces.keys() >= {"model.embed_tokens.weight", "lm_head.weight"}
    block = {n.split(".")[-2]: s.axis for n, s in pieces.items() if "layers.1." in n}
    assert block == {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}


def test_parts_that_would_not_be_equal_are_refused_with_module_and_line() -> None:
    with pytest.raises(RefusedError, match=r"o_proj.* has no 4 equal parts: it sums over 2 x 2") as refused:
        choose(graph_of_case("llama"), 4)
    assert "layers.0.self_attn.o_proj" in str(refused.value) and "modeling_llama.py:" in str(refused.value)
    x = Op("y", "aten.relu.default", ("x",), ("y",), attrs=(("self", "%x"),))
    with pytest.raises(RefusedError, match="nothing in the model can be divided among 2 ranks"):
        choose(graph_of([x], {"x": (4, 8), "y": (4, 8)}, {}), 2)


def test_the_checker_refuses_what_a_rule_does_not_allow() -> None:
    graph = graph_of_case("gpt2")
    right, factors = choose(graph, 2), factors_of(graph)
    check(right, graph, factors)
    refused = 0
    for call in calls_of(graph):
        own = right.strategies[call.op.name]
        for wrong in (uniform(call, cut(0)), uniform(call, cut(len(call.shape(call.op.writes[0])) - 1, 3))):
            if wrong in strategies(call, factors, 2) or wrong == own:
                continue
            with pytest.raises(PlanError):
                check(type(right)(2, {**right.strategies, call.op.name: wrong}, right.states), graph, factors)
            refused += 1
    assert refused > 100
    for name, state in right.states.items():
        other = cut(0) if state.kind != CUT_KIND else State("whole")
        if name in graph.param_map() or name in graph.inputs:
            continue
        with pytest.raises(PlanError):
            check(type(right)(2, right.strategies, {**right.states, name: other}), graph, factors)

"""Atoms: what is cloned, what is not, and what an atom says of itself."""

from __future__ import annotations

from hypothesis import given
from support.languages.graphs import graph, graphs, layers

from autopart.ir.graph import Cost, Graph, check
from autopart.passes.graph.atoms import CHEAP_NS, HEAVY_SHARE, MOST_CLONES, atoms, free_ops


def parts(g: Graph) -> dict[str, tuple[str, ...]]:
    return {op.name: op.parts for op in atoms(g).ops}


def test_constant_is_cloned_into_each_reader() -> None:
    g = graph("mask-; a +w <- x mask; b <- a; c <- b mask")
    assert parts(g) == {"a": ("mask", "a"), "b": ("b",), "c": ("mask", "c")}
    assert atoms(g).op_map()["c"].reads == ("b",)


def test_chain_of_constants_is_cloned_in_captured_order() -> None:
    g = graph("pos-; freq- ~inv; angle- <- pos freq; cos- <- angle; sin- <- angle; q <- x cos sin; k <- q cos")
    assert parts(g) == {"q": ("pos", "freq", "angle", "cos", "sin", "q"), "k": ("pos", "freq", "angle", "cos", "k")}
    assert atoms(g).op_map()["k"].params == ("inv",)


def test_mask_from_inputs_is_cloned_when_it_is_larger_than_they_are() -> None:
    g = graph("mask- #64 <- ids; a <- x mask; b <- a mask", input_bytes=8)
    assert parts(g) == {"a": ("mask", "a"), "b": ("mask", "b")}
    assert atoms(g).op_map()["b"].reads == ("ids", "a")


def test_value_smaller_than_its_inputs_is_sent() -> None:
    g = graph("count- #1 <- ids; a <- x count; b <- a count", input_bytes=8)
    assert parts(g) == {"count": ("count",), "a": ("a",), "b": ("b",)}


def test_small_link_to_a_large_mask_is_cloned_with_it() -> None:
    g = graph("bools- #1 <- ids; mask- #64 <- bools; a <- x mask; b <- a mask", input_bytes=8)
    assert parts(g)["b"] == ("bools", "mask", "b")


def test_inputs_are_counted_once_and_through_the_whole_chain() -> None:
    g = graph("both- #20 <- i j; use- #20 <- both i; a <- x use; b <- a use", input_bytes=8)
    assert parts(g)["b"] == ("both", "use", "b")
    g = graph("both- #15 <- i j; use- #15 <- both i; a <- x use; b <- a use", input_bytes=8)
    assert parts(g)["b"] == ("b",)


def test_heavy_op_is_not_cloned() -> None:
    def free(ns: int) -> frozenset[str]:
        return free_ops(graph(f"t-:{ns}/0; a:{10**7} <- x t; b:{10**7} <- a t"))

    limit_ns = 6 * 10**7 // (HEAVY_SHARE - 1)
    assert free(limit_ns) == {"t"} and free(limit_ns + 1) == frozenset()


def test_clone_cheaper_than_a_message_may_be_a_large_share_of_a_small_model() -> None:
    for ns, free in ((CHEAP_NS, {"t"}), (CHEAP_NS + 1, set())):
        assert free_ops(graph(f"t-:{ns}/0; a:50 <- x t; b:50 <- a t")) == free


def test_cheap_op_that_needs_too_many_others_is_not_cloned() -> None:
    chain = ["c0-", *(f"c{i}- <- c{i - 1}" for i in range(1, MOST_CLONES + 2)), f"a <- x c{MOST_CLONES + 1}"]
    assert len(free_ops(graph(";".join(chain)))) == MOST_CLONES


def test_random_learned_mutated_and_differentiated_ops_stay_single() -> None:
    for mark in ("r- !", "r- +w", "r"):
        assert free_ops(graph(f"{mark}; a <- x r; b <- a r")) == frozenset(), mark
    assert free_ops(graph("r- ~run; a <- x r; b =run <- a r")) == frozenset()
    assert free_ops(graph("r- ~run; a <- x r; b <- a r")) == {"r"}


def test_op_that_writes_an_output_stays_single() -> None:
    g = graph("mask-; a <- x mask; b <- a mask; -> b mask")
    assert parts(g) == {"mask": ("mask",), "a": ("a",), "b": ("b",)}


def test_op_that_nobody_reads_keeps_a_place() -> None:
    assert parts(graph("c-; dead- <- c; a <- x")) == {"dead": ("c", "dead"), "a": ("a",)}


def test_graph_of_free_ops_alone_keeps_its_output() -> None:
    assert parts(graph("c-; d- <- c; out- <- d")) == {"out": ("c", "d", "out")}


def test_clone_is_charged_once() -> None:
    g = graph("t-:1/0; a:50/50 <- x t; b:50/50 <- a t")
    assert [op.cost.fwd_ns for op in atoms(g).ops] == [51, 50]


def test_layers_without_free_ops_are_their_own_atoms() -> None:
    g = layers(3)
    assert atoms(g).ops == g.ops


@given(graphs())
def test_atoms_cover_the_graph_and_can_run(g: Graph) -> None:
    fine = check(atoms(g))
    ops, free = g.op_map(), free_ops(g)
    place = {op.name: i for i, op in enumerate(g.ops)}
    assert {part for op in fine.ops for part in op.parts} == set(ops)
    assert [op.name for op in fine.ops] == [op.name for op in g.ops if op.name not in free]
    assert sum((op.cost for op in fine.ops), Cost()) == sum((op.cost for op in g.ops), Cost())
    for atom in fine.ops:
        assert atom.parts[-1] == atom.name and set(atom.parts[:-1]) <= free
        assert list(atom.parts) == sorted(atom.parts, key=place.__getitem__)
        ready = set(atom.reads)
        for part in atom.parts:
            assert set(ops[part].reads) <= ready
            ready.update(ops[part].writes)
        assert set(atom.params) == {p for part in atom.parts for p in ops[part].params}
    for name in free:
        op = ops[name]
        assert not op.random and not any(g.value_map()[w].grad for w in op.writes)
        assert not set(op.writes) & {*g.outputs, *(v for _, v in g.updates)}

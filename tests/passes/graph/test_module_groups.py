"""Patterns of module paths as groups of ops."""

from __future__ import annotations

import pytest
from support.languages.graphs import graph

from autopart.ir.errors import UsageError
from autopart.passes.graph.cuts import module_groups

G = graph(
    "e @embed <- x; a @layers.0.attn <- e; b @layers.0.mlp <- a; r @layers.0 <- b; c @layers.1.attn <- r; "
    "m <- x; d @layers.1.mlp <- c m; o @head <- d"
)


def test_each_module_that_fits_is_a_group_with_all_that_it_holds() -> None:
    assert module_groups(G, ["layers.*"]) == (("a", "b", "r"), ("c", "d"))
    assert module_groups(G, ["layers.1"]) == (("c", "d"),)
    assert module_groups(G, ["*.mlp", "head"]) == (("b",), ("d",), ("o",))
    assert module_groups(G, ["layers.?.attn"]) == (("a",), ("c",))


def test_of_modules_inside_each_other_the_outer_one_counts() -> None:
    assert module_groups(G, ["layers.0.mlp", "layers.0", "*.attn"]) == (("a", "b", "r"), ("c",))
    assert module_groups(G, ["layers"]) == (("a", "b", "r", "c", "d"),)


@pytest.mark.parametrize("pattern", ["layer.*", "layers.2", "layers.0.attn.*"])
def test_a_pattern_that_fits_nothing_is_an_error_with_close_names(pattern: str) -> None:
    with pytest.raises(UsageError, match="fits no module") as caught:
        module_groups(G, ["head", pattern])
    assert pattern in caught.value.what and "layers" in caught.value.fix

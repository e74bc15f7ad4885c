"""Which rank keeps what under a plan."""

from __future__ import annotations

import pytest
from support.languages.parse import parse_decision, parse_graph

from autopart.ir.errors import PlanError
from autopart.session.placement import placement_of

GRAPH = parse_graph("a +big:900 +tied:100 <- x; b +tied +other:50 <- a")
"""Dealt stage by stage, the replicas would own `tied` as the smaller of two parameters, then as the larger."""


def owners(first: str, second: str) -> list[dict[str, int]]:
    """Return the owners in each of two stages on these ranks, which share the optimizer state."""
    text = f"schedule 1f1b, micro-batches of 1 rows, world 3, zero 1\nstage on {first}: a\nstage on {second}: b"
    sharing = placement_of(GRAPH, parse_decision(text)).sharing
    return [dict(next((each.owners for each in sharing if each.stage == stage), {})) for stage in (0, 1)]


def test_replicas_of_two_stages_have_one_owner_of_a_tied_parameter() -> None:
    assert owners("0 1", "0 1") == [{"big": 0, "tied": 1}, {"tied": 1, "other": 0}]
    assert owners("1 0", "0 1") == [{"big": 1, "tied": 0}, {"tied": 0, "other": 0}]


def test_a_rank_that_has_a_parameter_alone_keeps_it_among_replicas() -> None:
    assert owners("1", "0 1") == [{}, {"tied": 1, "other": 0}]


def test_replicas_that_are_partly_the_same_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"parameter tied is used by stages on ranks \[0, 1\] and on ranks \[1, 2\]"):
        owners("0 1", "1 2")


def test_stages_without_common_ranks_have_owners_of_their_own() -> None:
    assert owners("0", "1 2") == [{}, {"tied": 1, "other": 2}]

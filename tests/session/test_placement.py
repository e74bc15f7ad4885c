"""Which rank keeps what under a plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.parse import parse_decision, parse_graph

from autopart.ir.decision import Decision, Stage
from autopart.ir.errors import PlanError
from autopart.ir.shares import largest_share
from autopart.passes.shards.states import cut
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


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=9),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
)
def test_each_piece_has_one_owner_among_the_ranks_that_hold_it(
    params: list[tuple[int, bool]], replicas: int, shards: int
) -> None:
    """The ranks of one replica own all pieces of a parameter, and none owns more than is charged."""
    graph = parse_graph("a " + " ".join(f"+p{n}:{size * shards}" for n, (size, _) in enumerate(params)) + " <- x")
    held = tuple((f"p{n}", cut(0)) for n, (_, divided) in enumerate(params) if divided)
    ranks = tuple(reversed(range(replicas * shards)))
    decision = Decision(len(ranks), (Stage(("a",), ranks, shards=shards),), (1,), "1f1b", 1)
    placement = placement_of(graph, decision, held)
    owned, local = dict.fromkeys(ranks, 0), list[int]()
    for number, (size, divided) in enumerate(params):
        pieces = placement.pieces(f"p{number}")
        assert len(pieces) == (shards if divided else 1)
        local.append(size if divided else size * shards)
        if replicas == 1:
            assert all(placement.keepers[piece] == placement.holders[piece] for piece in pieces)
            continue
        owners = [owner for piece in pieces for owner in placement.keepers[piece]]
        assert [placement.owners[piece] for piece in pieces] == owners and len(owners) == len(pieces)
        assert all(owner in placement.holders[piece] for piece, owner in zip(pieces, owners, strict=True))
        assert len({ranks.index(owner) // shards for owner in owners}) == 1
        for owner in owners:
            owned[owner] += local[-1]
    assert max(owned.values()) <= largest_share(local, replicas)
    for sharing in placement.sharing:
        assert all(owner in sharing.ranks for owner in sharing.owners.values())
        assert len(sharing.ranks) == (replicas if sharing.parted else replicas * shards)

"""The verifier against an independent definition of a good program, on programs that were broken at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.graphs import graph

from autopart.ir.errors import ProgramError
from autopart.ir.plan import SCHEDULES, Decision, Stage, in_flight
from autopart.ir.program import Action, Program, parse_action, parse_actions
from autopart.passes.program.routing import route
from autopart.passes.program.verify import check_program, forward_program

SKIPS = "a +w <- x; b <- a y; c <- b a; d +w <- c b"
"""Four ops with skips, an input read late and a tied parameter."""


def program(schedule: str = "1f1b", micros: int = 3, stages: str = "a | b | c | d") -> Program:
    rows = [tuple(names.split()) for names in stages.split("|")]
    placed = tuple(Stage(names, (s,)) for s, names in enumerate(rows))
    return route(Decision(len(rows), placed, (1,) * micros, schedule), graph(SKIPS))


def is_good(p: Program, schedule: str) -> bool:
    """The same question answered by definition: right actions, right order on each rank, no cycle between ranks."""
    actions = Counter(a for rank in p.ranks for a in rank)
    if actions != Counter(wanted(p)):
        return False
    order = nx.DiGraph()
    for rank in p.ranks:
        nx.add_path(order, rank)
    for edge in p.edges:
        for kind, src, dst in (("F", edge.src, edge.dst), ("B", edge.dst, edge.src)):
            if kind == "B" and not edge.grads:
                continue
            sends = [a for a in p.ranks[src] if (a.kind, a.peer) == (f"S{kind}", dst)]
            receives = [a for a in p.ranks[dst] if (a.kind, a.peer) == (f"R{kind}", src)]
            if [a.micro for a in sends] != [a.micro for a in receives]:
                return False
            order.add_edges_from(zip(sends, receives, strict=True))
    return nx.is_directed_acyclic_graph(order) and all(
        rank_is_good(p.ranks[r], s, p, schedule) for s, r in enumerate(p.stage_ranks)
    )


def wanted(p: Program) -> list[Action]:
    result = [Action("T", s) for s in {s for _, stages in p.tied for s in stages}]
    for i in range(p.micros):
        result += [Action(kind, s, i) for kind in "FB" for s in range(len(p.stage_ranks))]
        for e in p.edges:
            result += [Action("SF", e.src, i, e.dst), Action("RF", e.dst, i, e.src)]
            if e.grads:
                result += [Action("SB", e.dst, i, e.src), Action("RB", e.src, i, e.dst)]
    return result


def rank_is_good(actions: tuple[Action, ...], s: int, p: Program, schedule: str) -> bool:
    at = {a: place for place, a in enumerate(actions)}
    for a in actions:
        if a.kind in ("RF", "RB") and at[a] > at[Action(a.kind[1], s, a.micro)]:
            return False
        if a.kind in ("SF", "SB") and at[a] < at[Action(a.kind[1], s, a.micro)]:
            return False
        if a.kind == "B" and at[a] < at[Action("F", s, a.micro)]:
            return False
        if a.kind == "T" and at[a] != len(actions) - 1:
            return False
    live = 0
    for a in actions:
        live += (a.kind == "F") - (a.kind == "B")
        if live > in_flight(schedule, s, len(p.stage_ranks), p.micros):
            return False
    return True


def accepted(p: Program, schedule: str) -> bool:
    try:
        check_program(p, schedule)
    except ProgramError:
        return False
    return True


def with_rank(p: Program, rank: int, actions: list[Action]) -> Program:
    return replace(p, ranks=(*p.ranks[:rank], tuple(actions), *p.ranks[rank + 1 :]))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micros", [1, 2, 5])
@pytest.mark.parametrize("stages", ["a b c d", "a | b c d", "a b | c d", "a | b | c | d"])
def test_generated_programs_are_good(schedule: str, micros: int, stages: str) -> None:
    p = program(schedule, micros, stages)
    assert check_program(p, schedule) is p and is_good(p, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_is_needed_once(schedule: str) -> None:
    p = program(schedule)
    for rank, actions in enumerate(p.ranks):
        for place, action in enumerate(actions):
            dropped = [*actions[:place], *actions[place + 1 :]]
            doubled = [*actions[:place], action, *actions[place:]]
            assert not accepted(with_rank(p, rank, dropped), schedule), f"without {action}"
            assert not accepted(with_rank(p, rank, doubled), schedule), f"with {action} twice"


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.data())
def test_verdict_on_mutated_programs_is_that_of_the_definition(schedule: str, micros: int, data: st.DataObject) -> None:
    p = program(schedule, micros, data.draw(st.sampled_from(["a b | c d", "a | b c | d", "a | b | c | d"])))
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, len(p.ranks) - 1))
        actions = list(p.ranks[rank])
        one, two = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        match data.draw(st.sampled_from(["swap", "near", "move", "micro", "peer", "drop", "double"])):
            case "swap":
                actions[one], actions[two] = actions[two], actions[one]
            case "near":
                actions[one - 1], actions[one] = actions[one], actions[one - 1]
            case "move":
                actions.insert(two, actions.pop(one))
            case "micro":
                actions[one] = replace(actions[one], micro=data.draw(st.integers(0, micros - 1)))
            case "peer" if actions[one].peer is not None:
                actions[one] = replace(actions[one], peer=data.draw(st.integers(0, len(p.ranks) - 1)))
            case "drop" if len(actions) > 1:
                actions.pop(one)
            case "double":
                actions.insert(two, actions[one])
        p = with_rank(p, rank, actions)
    good = is_good(p, schedule)
    event("still good" if good else "broken")
    assert accepted(p, schedule) == good


def broken(text: str, **changes: object) -> Program:
    """Two stages with one edge; `text` is their actions."""
    one = route(Decision(2, (Stage(("a",), (0,)), Stage(("b",), (1,))), (1, 1), "1f1b"), graph("a +w <- x; b <- a"))
    return replace(one, ranks=parse_actions(text.strip()), **changes)  # type: ignore[arg-type]


GOOD = """0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1
1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("0SF0>1 0F1", "0F1 0SF0>1", ""),  # harmless: sent later, still in order
        ("1RF1<0 1F1", "1F1 1RF1<0", "1F1 runs before it has received from stage 0"),
        ("0RB0<1 0B0", "0B0 0RB0<1", "0B0 runs before it has received from stage 1"),
        ("0F0 0SF0>1", "0SF0>1 0F0", "0SF0>1 sends what is not computed yet"),
        ("1B0 1SB0>0", "1SB0>0 1B0", "1SB0>0 sends what is not computed yet"),
        ("1F0 1B0", "1B0 1F0", "1B0 runs before its forward"),
        ("0F1 0SF1>1", "0F1 0F1 0SF1>1", "0F1 runs twice"),
        ("0SF1>1", "0SF1>1 0SF1>1", "0SF1>1 sends twice"),
        ("0SF0>1 0F1 0SF1>1", "0F1 0SF1>1 0SF0>1", "1RF0<0 meets 0SF1>1, which comes first on that channel"),
        ("1B0 1SB0>0 1RF1<0 1F1", "1RF1<0 1F1 1B0 1SB0>0", "1F1 puts 2 micro-batches in flight on stage 1"),
        ("0SF1>1 0RB0<1", "0RB0<1 0B0 0RB1<1 0SF1>1", "deadlocks"),
        (" 1B1 1SB1>0", "", "deadlocks"),
        (" 0RB1<1 0B1", "", "0B1 never runs"),
        (" 1SB1>0", " 1T", "1T: stage 1 shares no trainable parameter"),
        ("1SB1>0", "1SB1>1", "1SB1>1 sends what no edge carries"),
        ("1RF1<0", "1RF1<1", "1RF1<1 receives what no edge carries"),
        ("1F1", "0F1", "rank 1 does not run stage 0"),
        ("1F1", "1F7", "there is no micro-batch 7"),
    ],
)
def test_each_rule_names_the_action_that_breaks_it(old: str, new: str, message: str) -> None:
    assert old in GOOD
    p = broken(GOOD.replace(old, new, 1))
    if not message:
        check_program(p, "1f1b")
        return
    with pytest.raises(ProgramError) as caught:
        check_program(p, "1f1b")
    assert message in str(caught.value) and "rank" in str(caught.value)


def test_deadlock_names_who_waits_for_whom() -> None:
    p = broken("0RB0<1 0F0 0SF0>1 0B0 0F1 0SF1>1 0RB1<1 0B1\n" + GOOD.splitlines()[1])
    with pytest.raises(ProgramError) as caught:
        check_program(p, "1f1b")
    assert (
        "rank 0 waits at 0RB0<1 for rank 1; rank 1 waits at 1RF0<0 for rank 0; rank 0 waits already" in caught.value.why
    )
    assert "rank 0, stage 0, action 0: [0RB0<1] 0F0" in caught.value.where


def test_rank_that_ended_is_named_when_another_waits_for_it() -> None:
    p = broken(GOOD.replace(" 1B1 1SB1>0", ""))
    with pytest.raises(ProgramError, match="rank 0 waits at 0RB1<1 for rank 1; rank 1 has ended"):
        check_program(p, "1f1b")


def test_sum_must_be_last_and_present() -> None:
    p = broken(GOOD, tied=(("w", (0, 1)),))
    with pytest.raises(ProgramError, match="0T is missing"):
        check_program(p, "1f1b")
    both = GOOD.replace("0B1", "0B1 0T") + " 1T"
    check_program(replace(p, ranks=parse_actions(both)), "1f1b")
    with pytest.raises(ProgramError, match="0B1 stands behind T"):
        check_program(replace(p, ranks=parse_actions(both.replace("0B1 0T", "0T 0B1"))), "1f1b")


def test_message_left_over_is_an_error() -> None:
    p = broken(GOOD)
    rank_1 = [a for a in p.ranks[1] if str(a) != "1RF1<0"]
    with pytest.raises(ProgramError, match="1F1 runs before"):
        check_program(with_rank(p, 1, rank_1), "1f1b")
    p = replace(broken("0F0 0SF0>1\n1F0"), micros=1, edges=p.edges)
    with pytest.raises(ProgramError):
        check_program(p, "1f1b", backward=False)


def test_edges_point_to_later_stages() -> None:
    p = broken(GOOD)
    with pytest.raises(ProgramError, match="later stage"):
        check_program(replace(p, edges=(replace(p.edges[0], src=1, dst=0),)), "1f1b")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_program_has_no_way_back(schedule: str) -> None:
    p = forward_program(program(schedule))
    check_program(p, schedule, backward=False)
    assert {a.kind for actions in p.ranks for a in actions} == {"F", "SF", "RF"}
    assert p.tied == () and not any(edge.grads for edge in p.edges)
    with pytest.raises(ProgramError, match="never runs" if schedule == "gpipe" else "in flight"):
        check_program(p, schedule)
    with pytest.raises(ProgramError, match="stands in a forward program"):
        check_program(program(schedule), schedule, backward=False)


def test_actions_print_and_parse_back() -> None:
    for rank in program().ranks:
        for action in rank:
            assert parse_action(str(action)) == action


def test_thirty_two_stages_are_verified() -> None:
    names = [f"v{s}" for s in range(32)]
    g = graph("; ".join(f"{n} <- {names[s - 1] if s else 'x'}" for s, n in enumerate(names)))
    placed = tuple(Stage((n,), (s,)) for s, n in enumerate(names))
    check_program(route(Decision(32, placed, (1,) * 256, "1f1b"), g), "1f1b")

"""The verifier against an independent definition of a good program, on programs that were broken at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.languages.graphs import graph
from support.languages.parts import parse_actions
from support.languages.programs import program
from support.oracles.strict import hangs, issued, received_late

from autopart.ir.actions import Action, Slot, parse_action
from autopart.ir.errors import ProgramError
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Program
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import find, register
from autopart.passes.program.verify import check_program, forward_program


def is_good(p: Program, schedule: str) -> bool:
    """The same question answered by definition: right actions, each behind what it needs."""
    if Counter(p.order) != Counter(wanted(p)):
        return False
    at = {action: place for place, action in enumerate(p.order)}
    if any(at[first] > at[then] for first, then in needs(p).edges):
        return False
    for group in nx.connected_components(nx.Graph((a, b) for _, users in p.tied for a in users for b in users)):
        sums = sorted(at[Action("T", Slot(s))] for s in group)
        if sums[-1] - sums[0] >= len(sums):
            return False
    limit = find(schedule).limit
    assert limit is not None
    units, more = p.micros * p.slices, p.slices - 1
    for s in range(len(p.stage_ranks)):
        live = 0
        for action in p.order:
            if action.stage == s and action.kind in ("F", "B"):
                live += 1 if action.kind == "F" else -1
                if live > limit(s, len(p.stage_ranks), units) + more:
                    return False
    return True


def wanted(p: Program) -> list[Action]:
    tied = {s for _, stages in p.tied for s in stages}
    result = [Action("T", Slot(s)) for s in tied]
    for s, ranks in enumerate(p.stage_ranks):
        result += [Action("A", Slot(0))] * (s == 0 and p.world > 1)
        result += [Action("O", Slot(s))] + [Action("R", Slot(s))] * (len(ranks) > 1)
        for i, j in slots(p):
            result += [Action("F", Slot(s, i, j)), Action("B", Slot(s, i, j))]
    for i, j in slots(p):
        for e in p.edges:
            if not j or set(e.values) - set(e.whole):
                result.append(Action("SF", Slot(e.src, i, j), e.dst))
            if set(e.grads) - (set(e.whole) if j else set()):
                result.append(Action("SB", Slot(e.dst, i, j), e.src))
    return result


def slots(p: Program) -> list[tuple[int, int]]:
    return [(i, j) for i in range(p.micros) for j in range(p.slices)]


def needs(p: Program) -> nx.DiGraph:
    """(first, then) of all that depend on each other."""
    found = nx.DiGraph()
    there = set(wanted(p))
    for i, j in slots(p):
        for s in range(len(p.stage_ranks)):
            found.add_edge(Action("F", Slot(s, i, j)), Action("B", Slot(s, i, j)))
            if j:  # states pass on, and their gradients back
                found.add_edge(Action("F", Slot(s, i, j - 1)), Action("F", Slot(s, i, j)))
                found.add_edge(Action("B", Slot(s, i, j)), Action("B", Slot(s, i, j - 1)))
        for e in p.edges:
            send, back = Action("SF", Slot(e.src, i, j), e.dst), Action("SB", Slot(e.dst, i, j), e.src)
            if send in there:
                nx.add_path(found, [Action("F", Slot(e.src, i, j)), send, Action("F", Slot(e.dst, i, j))])
            if back in there:
                nx.add_path(found, [Action("B", Slot(e.dst, i, j)), back, Action("B", Slot(e.src, i, j))])
    for last in [action for action in wanted(p) if action.kind == "O"]:
        of_stage = [a for a in wanted(p) if a.stage == last.stage and a != last and a.kind != "A"]
        found.add_edges_from((action, last) for action in of_stage)
        agreed = [a for a in wanted(p) if a.kind == "A"]
        found.add_edges_from((action, last) for action in agreed)
        found.add_edges_from((action, a) for a in agreed for action in wanted(p) if action.kind == "B")
        sums = [a for a in of_stage if a.kind == "R"]
        found.add_edges_from((action, s) for s in sums for action in of_stage if action.kind == "B")
    for _, stages in p.tied:
        group = nx.node_connected_component(nx.Graph((a, b) for _, u in p.tied for a in u for b in u), stages[0])
        for s in stages:
            found.add_edges_from(
                (Action("B", Slot(other, *slot)), Action("T", Slot(s))) for other in group for slot in slots(p)
            )
    return found


def accepted(p: Program, schedule: str) -> bool:
    try:
        check_program(p, schedule)
    except ProgramError:
        return False
    return True


def with_order(p: Program, actions: list[Action]) -> Program:
    return replace(p, order=tuple(actions))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micros", [1, 2, 5])
@pytest.mark.parametrize("stages", ["a b c d", "a | b c d", "a b | c d", "a | b | c | d"])
def test_generated_programs_are_good(schedule: str, micros: int, stages: str) -> None:
    p = program(schedule, micros, stages)
    assert check_program(p, schedule) is p and is_good(p, schedule)
    assert hangs(issued(p)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_action_is_needed_once(schedule: str) -> None:
    p = program(schedule, ranks=((0, 4), (1,), (2,), (3,)))
    for place, action in enumerate(p.order):
        dropped = [*p.order[:place], *p.order[place + 1 :]]
        doubled = [*p.order[:place], action, *p.order[place:]]
        assert not accepted(with_order(p, dropped), schedule), f"without {action}"
        assert not accepted(with_order(p, doubled), schedule), f"with {action} twice"


RANKS = {
    "a b | c d": ((0,), (1,)),
    "a | b c | d": ((0, 3), (1,), (2,)),
    "a | b | c | d": ((0,), (1,), (2,), (3,)),
}


@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.data())
def test_verdict_on_mutated_programs_is_that_of_the_definition(schedule: str, micros: int, data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from(list(RANKS)))
    p = program(schedule, micros, stages, RANKS[stages], slices=data.draw(st.sampled_from([1, 1, 2, 3])))
    for _ in range(data.draw(st.integers(1, 3))):
        actions = list(p.order)
        one, two = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
        slot = actions[one].slot
        match data.draw(st.sampled_from(["swap", "near", "move", "micro", "slice", "stage", "peer", "drop", "double"])):
            case "slice":
                actions[one] = actions[one]._replace(slot=slot._replace(slice=data.draw(st.integers(0, p.slices))))
            case "swap":
                actions[one], actions[two] = actions[two], actions[one]
            case "near":
                actions[one - 1], actions[one] = actions[one], actions[one - 1]
            case "move":
                actions.insert(two, actions.pop(one))
            case "micro":
                moved = slot._replace(micro=data.draw(st.integers(-1, micros)))
                actions[one] = actions[one]._replace(slot=moved)
            case "stage":
                moved = slot._replace(stage=data.draw(st.integers(0, len(p.stage_ranks))))
                actions[one] = actions[one]._replace(slot=moved)
            case "peer":
                actions[one] = actions[one]._replace(peer=data.draw(st.none() | st.integers(0, len(p.stage_ranks))))
            case "drop" if len(actions) > 1:
                actions.pop(one)
            case "double":
                actions.insert(two, actions[one])
        p = with_order(p, actions)
    good = is_good(p, schedule)
    event("still good" if good else "broken")
    assert accepted(p, schedule) == good
    if good:
        assert hangs(issued(p)) == []


def broken(text: str, **changes: object) -> Program:
    """Two stages with one edge; `text` is their order."""
    one = route(Decision(2, (Stage(("a",), (0,)), Stage(("b",), (1,))), (1, 1), "1f1b"), graph("a +w <- x; b <- a"))
    return replace(one, order=parse_actions(text), **changes)  # type: ignore[arg-type]


GOOD = "0F0 0SF0>1 0F1 0SF1>1 1F0 1B0 1SB0>0 1F1 1B1 1SB1>0 0B0 0B1 0A 0O 1O"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("0SF0>1 0F1", "0F1 0SF0>1", ""),  # harmless: sent later
        ("0F0 0SF0>1 0F1 0SF1>1 1F0", "0F0 0F1 0SF1>1 1F0 0SF0>1", "1F0 runs before it can have received from stage 0"),
        ("1SB0>0 1F1 1B1 1SB1>0 0B0", "0B0 1SB0>0 1F1 1B1 1SB1>0", "0B0 runs before it can have received from stage 1"),
        ("0F0 0SF0>1", "0SF0>1 0F0", "0SF0>1 sends what is not computed yet"),
        ("1B0 1SB0>0", "1SB0>0 1B0", "1SB0>0 sends what is not computed yet"),
        ("1F0 1B0", "1B0 1F0", "1B0 runs before its forward"),
        ("0F1 0SF1>1", "0F1 0F1 0SF1>1", "0F1 stands twice"),
        ("0SF1>1", "0SF1>1 0SF1>1", "0SF1>1 stands twice"),
        ("1F0 1B0 1SB0>0 1F1", "1F0 1F1 1B0 1SB0>0", "1F1 puts 2 micro-batches in flight on stage 1"),
        (" 0B1", "", "0A stands before the last backward"),
        (" 1B1 1SB1>0", "", "0B1 runs before it can have received from stage 1"),
        (" 1O", "", "1O is missing"),
        (" 1O", " 1T 1O", "1T: stage 1 shares no trainable parameter"),
        (" 1O", " 1R 1O", "1R: stage 1 has no replicas"),
        ("0B1 0A", "0A 0B1", "0A stands before the last backward"),
        ("0A 0O", "0O 0A", "0A stands behind the optimizer"),
        (" 0A", "", "0A is missing"),
        ("0A", "1A", "1A: all ranks meet in 0A"),
        ("0F0", "0G 0F0", "0G: the replicas of stage 0 do not share the optimizer's state"),
        ("1SB1>0", "1SB1>1", "1SB1>1 sends what no edge carries"),
        ("1F1", "1F7", "there is no micro-batch 7"),
        ("1F1", "3F1", "there is no stage 3"),
        ("1F1", "1F1.2", "there is no stage 1, micro-batch 1, slice 2"),
        ("1F0", "1RF0<0 1F0", "'RF' is not an action of an order"),
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
    assert message in str(caught.value)


def test_an_error_shows_what_the_rank_does_before_and_after() -> None:
    with pytest.raises(ProgramError) as caught:
        check_program(broken(GOOD.replace("1F0 1B0", "1B0 1F0")), "1f1b")
    assert caught.value.where == "rank 1, stage 1, action 4: 0SF0>1 0SF1>1 [1B0] 1F0 1SB0>0 1F1 1B1 1SB1>0"


def test_kinds_that_the_table_does_not_have_are_refused() -> None:
    p = broken(GOOD)
    with pytest.raises(ProgramError, match="'X' is not an action"):
        check_program(with_order(p, [Action("X", Slot(0, 0)), *p.order]), "1f1b")


def test_sums_stand_behind_all_backwards_of_those_that_share_and_side_by_side() -> None:
    p = broken(GOOD, tied=(("w", (0, 1)),))
    with pytest.raises(ProgramError, match="0T is missing"):
        check_program(p, "1f1b")
    check_program(replace(p, order=parse_actions(GOOD.replace("0A", "0T 1T 0A"))), "1f1b")
    for order, message in {
        GOOD.replace("0B1", "1T 0B1 0T"): "1T stands before the last backward",
        GOOD.replace("0O 1O", "0T 0O 1T 1O"): "0O stands between sums that meet",
        GOOD.replace("0O 1O", "0O 0T 1T 1O"): "0T stands behind the optimizer",
    }.items():
        with pytest.raises(ProgramError, match=message):
            check_program(replace(p, order=parse_actions(order)), "1f1b")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(((0,), (2,)), "stage 1 runs on ranks"), (((0,), ()), "stage 1 runs on ranks"), (((0, 0), (1,)), "stage 0 runs")],
)
def test_stages_need_ranks_that_exist(ranks: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check_program(replace(broken(GOOD), stage_ranks=ranks), "1f1b")


def test_edges_point_to_later_stages() -> None:
    p = broken(GOOD)
    with pytest.raises(ProgramError, match="later stage"):
        check_program(replace(p, edges=(replace(p.edges[0], src=1, dst=0),)), "1f1b")
    with pytest.raises(ProgramError, match="tied over stages"):
        check_program(replace(p, tied=(("w", (0,)),)), "1f1b")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_program_has_no_way_back(schedule: str) -> None:
    p = forward_program(program(schedule))
    check_program(p, schedule, backward=False)
    assert {a.kind for a in p.order} == {"F", "SF", "A"}
    assert p.tied == () and not any(edge.grads for edge in p.edges)
    with pytest.raises(ProgramError, match="stands before the last backward" if schedule == "gpipe" else "in flight"):
        check_program(p, schedule)
    with pytest.raises(ProgramError, match="stands in a forward program"):
        check_program(program(schedule), schedule, backward=False)
    assert hangs(issued(p)) == []


def test_actions_print_and_parse_back() -> None:
    p = program()
    for part in p.parts(range(p.world)):
        for action in part:
            assert parse_action(str(action)) == action


def test_thirty_two_stages_are_verified() -> None:
    names = [f"v{s}" for s in range(32)]
    g = graph("; ".join(f"{n} <- {names[s - 1] if s else 'x'}" for s, n in enumerate(names)))
    placed = tuple(Stage((n,), (s,)) for s, n in enumerate(names))
    check_program(route(Decision(32, placed, (1,) * 256, "1f1b"), g), "1f1b")


# ---- on a transport that buffers nothing ---------------------------------------------------------------------------


def test_receives_that_are_posted_only_when_needed_hang_where_nothing_is_buffered() -> None:
    """Why each rank posts a receive where the order has its send: rank 0 sends 0F1 while rank 1 sends 1B0 back."""
    p = program("1f1b", 4, "a b | c d")
    assert hangs(issued(p)) == []
    assert hangs(received_late(p)) != []


def test_ranks_that_do_not_follow_one_order_hang() -> None:
    queues = issued(program("1f1b", 2))
    messages = [i for i, (_, ranks) in enumerate(queues[1]) if ranks]
    first, second = messages[:2]
    queues[1][first], queues[1][second] = queues[1][second], queues[1][first]
    assert hangs(queues) != []


def looped(stages: int, micros: int) -> list[list[str]]:
    """Two workers with every second stage each (interleaving): all forwards, then all backwards."""
    return [
        [f"{s}F{i}" for i in range(micros) for s in range(worker, stages, 2)]
        + [f"{s}B{i}" for i in range(micros) for s in reversed(range(worker, stages, 2))]
        for worker in range(2)
    ]


@pytest.mark.parametrize("ranks", [((0,), (1,), (0,), (1,)), ((0, 2), (1, 3), (0, 2), (1, 3))])
def test_several_stages_on_a_rank_are_verified_and_never_hang(ranks: tuple[tuple[int, ...], ...]) -> None:
    register(looped)
    p = check_program(program("looped", 3, ranks=ranks), "looped")
    assert hangs(issued(p)) == []
    parts = p.parts(range(p.world))
    for src in range(p.world):
        for dst in range(p.world):
            posts = list(p.posts(src, dst))
            assert [a for a in parts[src] if a in set(posts)] == posts  # both ends: in the order of the sends
            assert {post.other_end for post in posts} <= set(parts[dst])


@pytest.mark.parametrize(
    ("order", "message", "why"),
    [
        ([["0B0", "0F0"], ["1F0", "1B0"]], "0B0 waits for ever for 0F0", "worker 0 runs it later"),
        ([["0F0", "0B0"], ["1B0", "1F0"]], "0B0 waits for ever for 1B0", "worker 1 waits at 1B0 for 1F0"),
        ([["0F0", "0B0"]], "0B0 waits for ever for 1B0", "no worker runs 1B0"),
    ],
)
def test_a_schedule_that_never_ends_is_refused_with_what_waits(order: list[list[str]], message: str, why: str) -> None:
    register(lambda stages, micros: order, name="wrong")
    with pytest.raises(ProgramError, match=f"schedule wrong can never end: {message}") as caught:
        program("wrong", 1, "a b | c d")
    assert why in (caught.value.why or "")


def test_a_schedule_that_leaves_out_a_backward_is_refused() -> None:
    register(lambda stages, micros: [["0F0"], ["1F0", "1B0"]], name="short")
    with pytest.raises(ProgramError, match="0T stands before the last backward"):
        check_program(program("short", 1, "a b | c d"), "short")


def shared(text: str, **changes: object) -> Program:
    """Two replicas of one stage that share the optimizer's state; `text` is the order."""
    g = graph("a +w <- x; b <- a")
    one = route(Decision(2, (Stage(("a", "b"), (0, 1)),), (1,), "1f1b", zero=1), g)
    return replace(one, order=parse_actions(text), **changes) if text else one  # type: ignore[arg-type]


def test_replicas_that_share_the_optimizers_state_gather_new_values_before_they_compute() -> None:
    p = shared("")
    assert str(p) == "0G 0F0 0B0 0R 0A 0O" and p.owners == (0,)
    check_program(p, "1f1b")
    assert str(check_program(forward_program(p), backward=False)) == "0G 0F0 0A"
    for order, message in {
        "0F0 0G 0B0 0R 0A 0O": "0F0 runs before 0G",
        "0F0 0B0 0R 0A 0O": "0F0 runs before 0G",
        "0G 0G 0F0 0B0 0R 0A 0O": "0G stands twice",
    }.items():
        with pytest.raises(ProgramError, match=message):
            check_program(shared(order), "1f1b")

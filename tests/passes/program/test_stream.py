"""Programs of asynchronous training: proven, with the updates and the versions of the definition."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.languages.graphs import graph
from support.languages.parts import parse_actions
from support.oracles.asynchronous import version

from autopart.ir.errors import PlanError, ProgramError
from autopart.ir.plan import Decision, Stage, check_decision
from autopart.passes.program.messages import check_messages
from autopart.passes.program.named import DELAYED, STASHED
from autopart.passes.program.stream import (
    in_ring,
    require_two_versions,
    ring_programs,
    ring_ticks,
    stream_program,
    streaming_of,
    tick_of,
)
from autopart.passes.program.verify import check_program

MODEL = graph("a:600 #60 +w <- x; b:100 #40 +v <- a; c:100 #4 +u <- a b; d:90 #4 +t <- c", input_bytes=24)
OPS = ("a", "b", "c", "d")


def decision(replicas: tuple[int, ...], policy: str, micros: int, schedule: str = STASHED) -> Decision:
    stages, world = [], 0
    for s, count in enumerate(replicas):
        ops = OPS[s : s + 1] if s + 1 < len(replicas) else OPS[s:]
        ranks = tuple(range(world, world := world + count))
        stages.append(Stage(ops, ranks, (), (), "turn" if policy == "turn" and count > 1 else "split"))
    return check_decision(Decision(world, tuple(stages), (4,) * micros, schedule), MODEL)


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    replicas = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    schedule = draw(st.sampled_from([STASHED, DELAYED]))
    made = decision(replicas, draw(st.sampled_from(["split", "turn"])), draw(st.integers(1, 6)), schedule)
    if schedule == DELAYED:
        rhythm = streaming_of(made)
        assume(max(rhythm.lags) <= rhythm.micros and max(rhythm.updates) == rhythm.micros)
    return made


@settings(max_examples=60)
@given(decisions(), st.integers(1, 7))
def test_every_program_is_proven_under_both_transports_rules(made: Decision, batches: int) -> None:
    require_two_versions(made)
    program = check_messages(check_program(stream_program(made, MODEL, batches), made.schedule))
    kinds = Counter((action.kind, action.stage) for action in program.order)
    for stage, every in enumerate(streaming_of(made).updates):
        assert kinds["F", stage] == kinds["B", stage] == batches * len(made.micro_rows)
        assert kinds["U", stage] == -(-batches * len(made.micro_rows) // every)


@settings(max_examples=60)
@given(decisions(), st.integers(1, 7))
def test_a_forward_stands_behind_the_updates_of_its_version_and_no_version_is_kept_for_nothing(
    made: Decision, batches: int
) -> None:
    rhythm, micros = streaming_of(made), len(made.micro_rows)
    done: Counter[int] = Counter()
    used: dict[tuple[int, int], int] = {}
    most: Counter[int] = Counter()
    for action in stream_program(made, MODEL, batches).order:
        stage, batch = action.stage, action.micro // micros
        if action.kind == "F":
            number = used[stage, action.micro] = rhythm.version(stage, batch)
            assert number <= done[stage]
            if not rhythm.delayed and action.micro % micros == 0:
                assert number == done[stage]
        elif action.kind == "B":
            assert rhythm.version(stage, batch) == used.pop((stage, action.micro))
        elif action.kind == "U":
            done[stage] += 1
        alive = {number for (s, _), number in used.items() if s == stage} | {done[stage]}
        if rhythm.delayed and done[stage]:
            alive.add(done[stage] - 1)  # the next batch uses it
        most[stage] = max(most[stage], len(alive))
    for stage in range(len(made.stages)):
        assert most[stage] <= rhythm.versions(stage)
        if batches * micros >= 2 * rhythm.ring:
            assert most[stage] == rhythm.versions(stage)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 40))
def test_versions_are_those_of_the_definition(replicas: list[int], batch: int) -> None:
    rhythm = streaming_of(decision(tuple(replicas), "turn", 1))
    for stage in range(len(replicas)):
        assert rhythm.version(stage, batch) == version(stage, batch, replicas, STASHED)


@settings(max_examples=30)
@given(decisions(), st.integers(1, 9))
def test_ticks_of_the_ring_without_what_does_not_exist_are_the_program_of_any_number_of_batches(
    made: Decision, batches: int
) -> None:
    rhythm, _, turns = ring_programs(made, MODEL)
    program = stream_program(made, MODEL, batches)
    for rank in range(made.world):
        ticks, played = ring_ticks(rhythm, turns, rank), []
        for tick in range(rhythm.last_tick(program.micros) + 1):
            for action in ticks[tick % rhythm.ring]:
                micro = tick - (tick_of(rhythm, action) - action.micro)
                last = min(micro, program.micros - 1)
                first = micro - rhythm.updates[action.stage] + 1 if action.kind == "U" else micro
                if micro >= 0 and first < program.micros:
                    played.append(in_ring(replace_micro(action, last), rhythm.ring))
        assert played == [in_ring(action, rhythm.ring) for action in program.part(rank)]


def replace_micro(action, micro):  # type: ignore[no-untyped-def]
    return action._replace(slot=action.slot._replace(micro=micro))


def test_the_text_of_a_program_shows_a_pipeline_that_is_not_emptied_between_batches() -> None:
    made = decision((1, 1), "split", 1)
    program = stream_program(made, MODEL, 3)
    own = [" ".join(str(a) for a in program.part(rank) if a.kind in "FBU") for rank in range(2)]
    assert own == ["0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2", "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2"]


@pytest.mark.parametrize("micros", [1, 2])
def test_an_update_out_of_place_is_refused(micros: int) -> None:
    made = decision((2, 1), "split", micros)
    program = stream_program(made, MODEL, 3)
    for place, action in enumerate(program.order):
        if action.kind != "U":
            continue
        rest = [*program.order[:place], *program.order[place + 1 :]]
        own = [n for n, other in enumerate(rest) if other.kind == "B" and other.stage == action.stage]
        before = next(n for n in own if rest[n].micro == action.micro)
        for wrong in (before, next((n + 1 for n in own if rest[n].micro > action.micro), None)):
            if wrong is not None:
                with pytest.raises(ProgramError, match=r"stands before the last backward|runs before|is missing"):
                    check_program(replace(program, order=(*rest[:wrong], action, *rest[wrong:])), made.schedule)
        with pytest.raises(ProgramError, match=r"is missing|runs before"):
            check_program(replace(program, order=tuple(rest)), made.schedule)
        with pytest.raises(ProgramError, match="stands twice"):
            check_program(replace(program, order=(*program.order, action)), made.schedule)


@pytest.mark.parametrize(("schedule", "micros"), [(STASHED, 1), (STASHED, 2), (DELAYED, 2)])
def test_a_forward_before_the_update_that_makes_its_weights_is_refused(schedule: str, micros: int) -> None:
    made = decision((1, 1), "split", micros, schedule)
    program, rhythm = stream_program(made, MODEL, 4), streaming_of(made)
    for place, action in enumerate(program.order):
        number = rhythm.version(action.stage, action.micro // micros)
        if action.kind != "F" or not number:
            continue
        update = program.updating(action.stage, number * rhythm.updates[action.stage] - 1)
        order = [*program.order[:place], *program.order[place + 1 :]]
        order.insert(order.index(update), action)
        with pytest.raises(ProgramError, match=f"{action} runs before"):
            check_program(replace(program, order=tuple(order)))


def test_the_first_part_of_a_backward_before_an_earlier_update_is_refused() -> None:
    program = stream_program(decision((1,), "split", 1), MODEL, 2)
    assert str(program) == "0F0 0B0 0U0 0F1 0B1 0U1"
    order = parse_actions("0F0 0B0 0U0 0F1 0I1 0W1 0U1")
    check_program(replace(program, order=order))
    program = replace(program, rhythm=replace(streaming_of(decision((1,), "split", 1)), delayed=True))
    check_program(replace(program, order=parse_actions("0F0 0F1 0B0 0U0 0I1 0W1 0U1")))
    with pytest.raises(ProgramError, match="0I1 runs before 0U0"):
        check_program(replace(program, order=parse_actions("0F0 0F1 0B0 0I1 0U0 0W1 0U1")))


def test_two_versions_need_as_many_micro_batches_as_are_in_flight() -> None:
    with pytest.raises(PlanError, match="pipedream-2bw cannot train with batches of 1 micro-batches") as caught:
        require_two_versions(decision((1, 1, 1), "split", 1, DELAYED))
    assert "micro_batches=2" in caught.value.fix
    require_two_versions(decision((1, 1, 1), "split", 2, DELAYED))
    with pytest.raises(PlanError):
        require_two_versions(decision((3, 1), "turn", 4, DELAYED))

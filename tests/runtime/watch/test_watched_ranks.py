"""Among many ranks each looks at few, and together they still find whoever holds up another one."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore, TCPStore

from autopart.runtime.activity import AWAY, BUSY, EVERYONE, NOBODY, PATIENT
from autopart.runtime.watch.heart import BEAT_S, READ_S, STORE_S, Heart
from autopart.runtime.watch.states import RankState, held_up_by, looked_at, verdict


def serve(connection: Connection) -> None:
    """Hold a store, and answer with the processor time that this took so far."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    connection.send(store.port)
    while connection.recv():
        connection.send(time.process_time())


def wait(port: int, ranks: range, size: int, limit_s: float, connection: Connection) -> None:
    """Send the heartbeats of these ranks and read those of the next two each, as ranks that wait, but in one thread."""
    hearts = []
    store = TCPStore("127.0.0.1", port, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=limit_s))
    for rank in ranks:  # each has a connection of its own
        with mock.patch.object(threading.Thread, "start"):
            heart = Heart(store, rank, size, 0)
        heart.enter("group")
        heart.wanted = {(rank + 1) % size, (rank + 2) % size}
        hearts.append(heart)
    connection.send("connected")
    connection.recv()
    reading, behind_s = 0, 0.0
    began = time.monotonic()
    while not connection.poll():
        for heart in hearts:
            if reading % round(BEAT_S / READ_S) == 0:
                heart._beat()
            heart._read_cause()
            heart._read()
        reading += 1
        left_s = began + reading * READ_S - time.monotonic()
        behind_s = max(behind_s, -left_s)
        time.sleep(max(0.0, left_s))
    silent_s = max(heart.silent_s(rank) if rank in heart.seen else 1e9 for heart in hearts for rank in heart.wanted)
    connection.send((silent_s, behind_s, reading))
    os._exit(0)


# -- tests -----------------------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> dict[int, RankState]:
    """Ranks of which most wait, for one or for all, and some cannot go on, left, plan or compute."""
    size = draw(st.integers(2, 40))
    kinds = draw(
        st.sampled_from((("all",), ("one",), ("all", "one"), ("all", "all", "all", "busy"), ("all", "one", "busy")))
    )
    rank = st.builds(
        lambda kind, peer, how: (kind, peer, how),
        st.sampled_from((*kinds * 3, "busy" if "busy" in kinds else kinds[0])),
        st.integers(0, size - 1),
        st.sampled_from(("", "", "", "dead", "away", "plans")),
    )
    states = {}
    for number in range(size):
        kind, peer, how = draw(rank)
        waits = EVERYONE if kind == "all" else NOBODY if kind == "busy" or peer == number else peer + 1
        phase = {"away": AWAY, "plans": PATIENT}.get(how, BUSY)
        dead = "ended" if how == "dead" else ""
        states[number] = RankState(
            number, waits=waits if phase == BUSY else NOBODY, phase=phase, dead=dead, still_s=50.0
        )
    return states


def after_reading(me: int, states: dict[int, RankState], *, late: bool) -> tuple[dict[int, RankState], bool, int]:
    """Return the states that a rank looks at in the end, whether they are all, and after how many readings."""
    known = {me: states[me]}
    for readings in range(3 * len(states)):
        ranks, whole = looked_at(me, known, len(states), late=late)
        if set(ranks) <= set(known):
            return {rank: known[rank] for rank in sorted(ranks)}, whole, readings
        known |= {rank: states[rank] for rank in ranks}
    raise AssertionError("it never ends")


@settings(max_examples=400)
@given(worlds())
def test_ranks_that_look_at_few_find_together_what_one_that_sees_all_finds(states: dict[int, RankState]) -> None:
    waiting = [rank for rank, state in states.items() if state.waiting]
    roots, found, ended = {}, set(), []
    for me in waiting:
        roots[me] = {state.rank for state in held_up_by(me, states)}
        seen, whole, _ = after_reading(me, states, late=False)
        mine = {state.rank for state in held_up_by(me, seen)}
        assert mine <= roots[me]  # nobody is blamed whom one that sees all would not blame
        found |= mine
        late, whole, _ = after_reading(me, states, late=True)
        assert {state.rank for state in held_up_by(me, late)} <= roots[me]
        ended.append(verdict(me, late, 99.0, 60.0, whole=whole))
        if whole and not held_up_by(me, late):
            assert not roots[me]  # they wait for each other
    assert found == set().union(*roots.values())
    if waiting and not any(roots.values()):  # a circle of all is found by at least one
        assert any(error is not None and "waited for each other" in error.what for error in ended)


def test_each_of_many_that_wait_for_all_looks_at_the_next_one() -> None:
    """While rank 0 plans, all others wait: then nobody reads more than two heartbeats."""
    size = 16384
    states = {rank: RankState(rank, waits=EVERYONE) for rank in range(size)} | {0: RankState(0, phase=PATIENT)}
    seen = {me: set(after_reading(me, states, late=False)[0]) - {me} for me in (1, 2, 777, size - 2, size - 1)}
    assert seen == {1: {2}, 2: {3}, 777: {778}, size - 2: {size - 1}, size - 1: {0, 1}}


def test_a_rank_that_waits_among_busy_ones_reads_all_in_few_readings() -> None:
    states = {rank: RankState(rank) for rank in range(1000)} | {5: RankState(5, waits=EVERYONE)}
    seen, whole, readings = after_reading(5, states, late=False)
    assert len(seen) == 1000 and whole and readings <= 12


@pytest.mark.slow
@pytest.mark.timeout(600)  # connecting takes 0.2 s each where the name of a host is not found
def test_one_store_serves_1024_ranks_that_wait_with_a_small_part_of_its_time() -> None:
    size, processes, measured_s = 1024, 8, 10.0
    context = multiprocessing.get_context("spawn")
    started = []

    def start(target: object, *given: object) -> Connection:
        here, there = context.Pipe()
        process = context.Process(target=target, args=(*given, there), daemon=True)  # type: ignore[arg-type]
        process.start()
        started.append(process)
        return here

    try:
        server = start(serve)
        port, share = server.recv(), size // processes
        clients = [start(wait, port, range(n * share, (n + 1) * share), size, 500.0) for n in range(processes)]
        assert [client.recv() for client in clients] == ["connected"] * processes
        for client in clients:
            client.send(True)
        used = []
        for wait_s in (3.0, measured_s):  # the first until all have sent a heartbeat
            time.sleep(wait_s)
            server.send(True)
            used.append((time.monotonic(), server.recv()))
        busy = (used[1][1] - used[0][1]) / (used[1][0] - used[0][0])
        for client in clients:
            client.send(True)
        silent_s, behind_s, readings = zip(*[client.recv() for client in clients], strict=True)
        print(json.dumps({"ranks": size, "part of the store's time": round(busy, 3), "silent s": max(silent_s),
                          "behind s": max(behind_s), "readings": min(readings)}))  # fmt: skip
        assert max(silent_s) < 5.0
        assert busy < 0.5 and max(READ_S, 16384 * STORE_S) <= 2.0
    finally:
        for process in started:
            process.kill()


def test_heartbeats_of_wanted_ranks_alone_are_read() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    beats = PrefixStore("autopart/watch/0", store)
    for rank in (1, 2):
        beats.set(f"beat/{rank}", json.dumps({"beat": 1, "pid": 1, "changes": 0, "waits": 0}))
    heart = Heart(store, 0, 16, 0)
    heart.wanted = (1, 3)
    end = time.monotonic() + 30
    heart.hurry()
    while not (heart.knows(1) and heart.knows(3)) and time.monotonic() < end:
        time.sleep(0.01)
    assert set(heart.seen) == {1} and heart.knows(3) and not heart.knows(2)
    heart.stop()

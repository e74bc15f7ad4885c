"""What a timeline says of itself: memory over time, and what made the step as long as it is."""

from __future__ import annotations

from support.languages.graphs import cluster
from support.oracles.simulated import chain, check_path, critical_path, ending, memory, play

from autopart.ir.actions import Action, Slot
from autopart.ir.timeline import Span, Timeline


def test_memory_is_held_from_the_start_of_a_forward_to_the_end_of_its_backward() -> None:
    timeline = play(chain(1, 2, "gpipe"), (2,), (3,), cluster(1))
    assert memory(timeline, 0, 10) == ((0, 0), (0, 10), (2, 20), (7, 10), (10, 0))
    assert memory(timeline, 1, 10) == ((0, 0),)


def test_memory_never_counts_a_new_forward_before_the_backward_that_ends_then() -> None:
    timeline = play(chain(1, 3, "1f1b"), (2,), (3,), cluster(1))
    assert max(held for _, held in memory(timeline, 0, 10)) == 10 == 10 * timeline.peak_bytes[0]


def test_the_critical_path_follows_the_messages() -> None:
    timeline = play(chain(2, 1, "1f1b"), (2, 2), (3, 3), cluster(2, latency_ns=1), size=4)
    path = [str(s.action) for s in critical_path(timeline)]
    assert path == ["0F0", "0SF0>1", "1F0", "1B0", "1SB0>0", "0B0"]
    check_path(timeline)


def test_the_critical_path_goes_through_a_busy_port() -> None:
    """Each message leaves when the one before it has left, before that has arrived: it counts up to there."""
    timeline = play(chain(2, 3, "gpipe"), (1, 1), (1, 1), cluster(2, latency_ns=4), size=10)
    path = critical_path(timeline)
    assert [(str(s.action), s.start_ns, s.end_ns) for s in path[:5]] == [
        ("0F0", 0, 1),
        ("0SF0>1", 1, 11),
        ("0SF1>1", 11, 21),
        ("0SF2>1", 21, 35),
        ("1F2", 35, 36),
    ]
    check_path(timeline)


def test_the_critical_path_ends_with_the_sum_and_the_optimizer() -> None:
    path = [str(s.action) for s in critical_path(ending(overlap=False))]
    assert path == ["0F0", "0B0", "0F1", "0B1", "0R", "0O"]
    check_path(ending(overlap=False))
    check_path(ending(overlap=True, optimizer_ns=()))


def test_the_critical_path_is_that_of_the_slow_stage() -> None:
    timeline = play(chain(3, 4, "1f1b"), (1, 9, 1), (1, 9, 1), cluster(3))
    assert sum(s.end_ns - s.start_ns for s in critical_path(timeline) if s.rank == 1) == 4 * 18
    check_path(timeline)


def test_nothing_has_no_critical_path() -> None:
    assert critical_path(Timeline(())) == ()
    assert critical_path(Timeline((Span(0, Action("F", Slot(0, 0)), 0, 0),))) == ()

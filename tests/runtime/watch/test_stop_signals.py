"""SIGTERM and SIGUSR1 in one process: noted between `enter` and `leave`, beside the handlers of the user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from autopart.runtime.watch.stop_signals import AGAIN_S, SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Every test begins with the system's handlers, also where a test before it left a pipe open, and leaves them."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    left = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == [signal.SIG_DFL] * len(SIGNALS)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_handlers_come_back_with_the_last_that_leaves(number: signal.Signals) -> None:
    stop = StopSignals()
    stop.enter()
    stop.enter()
    stop.leave()
    os.kill(os.getpid(), number)
    assert (stop.asked, stop.take(), stop.take()) == (number, [number], [])
    stop.leave()
    assert stop.asked == number


def test_a_handler_of_the_user_is_called_too_and_decides_over_a_second_signal() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        stop = StopSignals(again=lambda: pytest.fail("ended"), after_s=0.0)
        stop.enter()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.leave()
        assert seen == [signal.SIGTERM] * 2 and stop.asked == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_the_user_installs_later_stays() -> None:
    stop, own = StopSignals(), lambda number, frame: None
    stop.enter()
    before = signal.signal(signal.SIGUSR1, own)
    stop.leave()
    assert signal.getsignal(signal.SIGUSR1) is own
    assert before not in (signal.SIG_DFL, own)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_of_the_user_over_that_of_an_open_pipe_is_called_by_the_next_one_and_once() -> None:
    stop, seen = StopSignals(), []
    stop.enter()

    def own(number: int, frame: object) -> None:
        seen.append(number)
        earlier(number, frame)

    earlier = signal.signal(signal.SIGTERM, own)
    assert callable(earlier)
    try:
        stop.enter()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.leave()
        stop.leave()
        assert stop.take() == seen == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        stop = StopSignals()
        stop.enter()
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.leave()
        assert not stop.asked and signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("seconds", "ended"), [(AGAIN_S - 0.1, []), (AGAIN_S + 0.1, ["ended"])])
def test_a_second_sigterm_ends_the_process_unless_it_belongs_to_the_first(
    seconds: float, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, found = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = StopSignals(again=lambda: found.append("ended"))
    stop.enter()
    os.kill(os.getpid(), signal.SIGUSR1)  # a warning that SIGTERM will come is no SIGTERM
    now[0] += 100.0
    os.kill(os.getpid(), signal.SIGTERM)
    now[0] += seconds
    os.kill(os.getpid(), signal.SIGTERM)
    stop.leave()
    assert found == ended


def test_the_main_thread_catches_although_another_one_was_first() -> None:
    stop = StopSignals()
    other = threading.Thread(target=stop.enter)
    other.start()
    other.join()
    stop.enter()
    os.kill(os.getpid(), signal.SIGTERM)
    stop.leave()
    stop.leave()
    assert stop.take() == [signal.SIGTERM]


def test_another_thread_than_the_main_one_installs_nothing() -> None:
    stop = StopSignals()
    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=stop.enter)
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    stop.leave()


FORKING = """
import os, signal, time
from autopart.runtime.watch.stop_signals import StopSignals
stop = StopSignals(after_s=0.0)
stop.enter()
ready, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, b"!")
    while True:
        time.sleep(1)
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
print(os.WTERMSIG(os.waitpid(child, 0)[1]), stop.asked, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(stop.asked, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("lives")
"""


def test_a_forked_child_ends_by_a_signal_and_a_process_by_the_second() -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (-signal.SIGTERM, ["15", "0", "15"]), done.stderr

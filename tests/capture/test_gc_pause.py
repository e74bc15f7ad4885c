"""The garbage collector is paused while passes run, and is left as it was found."""

from __future__ import annotations

import gc
import threading

import pytest

from autopart.capture.gc_pause import gc_paused


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collector_is_left_as_it_was_found_whatever_happens(enabled: bool) -> None:
    with pytest.raises(ValueError), gc_paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled() == enabled


def test_collector_stays_paused_until_the_last_thread_has_left(enabled: bool) -> None:
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=pause)
    with gc_paused():
        other.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    other.join(60)
    assert gc.isenabled() == enabled

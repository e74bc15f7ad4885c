"""What a rank knows of the others at the end: rank 0, which holds the store, leaves last; notes of the dead are new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import PrefixStore, TCPStore

from autopart.runtime import activity
from autopart.runtime.watch.heart import Heart
from autopart.runtime.watch.monitor import Monitor
from autopart.runtime.watch.processes import this_machine

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def status() -> Iterator[None]:
    activity.publish_to(None)
    yield
    activity.publish_to(None)


def told(store: TCPStore, phase: int, note: str, pid: int = 0) -> None:
    """Send a heartbeat of rank 1."""
    beat = {"beat": 1, "pid": pid or os.getpid(), "machine": this_machine(), "label": "stage 1", "note": note,
            "waits": 0, "phase": phase, "changes": 1}  # fmt: skip
    PrefixStore("autopart/watch/0", store).set("beat/1", json.dumps(beat))


@pytest.mark.parametrize("how", ["leaves", "is killed"])
def test_rank_0_which_holds_the_store_leaves_after_the_others(store: TCPStore, how: str) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told(store, activity.BUSY, "between steps", other.pid)
    monitor = Monitor(0, 2, 60.0)
    monitor.attach(store, rank0_has_store=True)
    leaving = threading.Thread(target=monitor.stop)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    if how == "leaves":
        told(store, activity.AWAY, "between steps", other.pid)
    other.kill()
    other.communicate()
    leaving.join(3.0)
    assert not leaving.is_alive()


def test_rank_0_does_not_wait_after_a_failure_or_for_a_store_of_the_launcher(store: TCPStore) -> None:
    told(store, activity.BUSY, "between steps")
    for own in (True, False):
        monitor = Monitor(0, 2, 60.0)
        monitor.attach(store, rank0_has_store=own)
        if own:
            monitor.tell(ValueError("of the script"))
        leaving = threading.Thread(target=monitor.stop)
        leaving.start()
        leaving.join(3.0)
        assert not leaving.is_alive()


def test_the_note_of_a_rank_that_died_is_not_one_of_long_ago(store: TCPStore) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told(store, activity.PATIENT, "capturing the model", other.pid)
    monitor = Monitor(0, 2, 60.0)
    monitor.attach(store, rank0_has_store=False)
    heart = monitor._heart
    assert isinstance(heart, Heart)
    heart.wanted = (1,)
    heart.hurry()
    assert heart.failed() is False and heart.seen[1].beat["note"] == "capturing the model"
    heart.curious = False
    told(store, activity.BUSY, "2F0: forward of micro-batch 0", other.pid)
    other.kill()
    other.communicate()
    error = monitor.explained(ConnectionError("connection closed by peer"))
    monitor.stop()
    assert "2F0: forward of micro-batch 0, in its last heartbeat" in str(error) and "capturing" not in str(error)

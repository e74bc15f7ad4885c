"""Restarts of all ranks: which failures are tried again, how often, and what is said at the end (F1, F2, F17, F19 of
the table of faults)."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

import autopart
from autopart.ir.errors import UsageError, WorkerError
from autopart.launcher import restart_count
from autopart.runtime.group.rendezvous import launchers_store
from autopart.runtime.launch import restarts
from autopart.runtime.launch.local import launch
from autopart.runtime.launch.starting import forked


def die_until(times: int) -> tuple[int, bool]:
    """Kill rank 1 in the first `times` generations; return the number of the generation, and whether the other rank
    was found through the store of this one."""
    count = restart_count()
    store = PrefixStore("restarts", launchers_store(60.0)[0])
    mine, other = int(os.environ["RANK"]), 1 - int(os.environ["RANK"])
    stale = store.check([f"came/{mine}"])
    store.set(f"came/{mine}", str(count))
    met = store.get(f"came/{other}").decode() == str(count) and not stale
    if count < times and mine == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return count, met


def raise_always(folder: Path) -> None:
    """Leave a file for each generation, and raise the same error each time on rank 0."""
    if os.environ["RANK"] == "0":
        (folder / str(restart_count())).touch()
        raise ZeroDivisionError("the same in every generation")


def raise_anew() -> None:
    """Raise another error in each generation on rank 0."""
    if os.environ["RANK"] == "0":
        raise ValueError(f"generation {restart_count()}")


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def from_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks in milliseconds: how they start does not matter here."""
    monkeypatch.setattr(restarts, "Fleet", functools.partial(restarts.Fleet, start=forked))


@pytest.mark.usefixtures("from_a_fork")
def test_ranks_are_started_again_after_a_death_with_a_store_of_their_own() -> None:
    assert launch(die_until, 2, 1, restarts=1, timeout=150) == [(1, True), (1, True)]


@pytest.mark.usefixtures("from_a_fork")
def test_the_same_error_twice_ends_the_run_although_restarts_are_left(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
        launch(raise_always, 1, tmp_path, restarts=5, timeout=150)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert any("the same error twice is not tried again" in note for note in caught.value.__notes__)


@pytest.mark.usefixtures("from_a_fork")
def test_exhausted_restarts_raise_the_last_failure_and_name_the_earlier_ones() -> None:
    with pytest.raises(WorkerError, match="ValueError: generation 1") as caught:
        launch(raise_anew, 1, restarts=1, timeout=150)
    notes = "\n".join(caught.value.__notes__)
    assert notes.count("ValueError: generation 0") == 1 and "after 1 restart(s)" in notes


def test_pauses_double_while_ranks_fail_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class Failing:
        cause = None

        def __init__(self, world: int, deadline: float | None, generation: int, **_: object) -> None:
            self.generation = generation

        def run(self, call: bytes, name: str, deadline: float | None) -> list[object]:
            raise WorkerError(f"failure {self.generation}")

        def close(self) -> None:
            pass

    monkeypatch.setattr(restarts, "Fleet", Failing)
    monkeypatch.setattr(restarts, "_pause", lambda seconds, stop: pauses.append(seconds))
    with pytest.raises(WorkerError, match="failure 10"):
        restarts.run_generations(1, b"", "train", None, 10)
    assert pauses == [min(30.0, 0.1 * 2**n) for n in range(10)]


@pytest.mark.parametrize("count", [-1, 1.5, True, "3"])
def test_a_number_of_restarts_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(UsageError, match="restarts is"):
        autopart.launch(print, "cpu:1", restarts=count)  # type: ignore[arg-type]

"""Local processes: results, the environment they see, and how every failure ends all of them with one reason."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.jobs.failures import launch_jobs as jobs
from support.workers import Workers

from autopart.ir.errors import AutopartError, BatchError, ClusterError, StageError, UsageError, WorkerError
from autopart.runtime.activity import LABEL_BYTES, NOTE_BYTES, SharedStatus, publish_to, set_activity, set_rank_label
from autopart.runtime.launch import worker
from autopart.runtime.launch.local import launch
from autopart.runtime.launch.reasons import Death, first_cause, is_explained
from autopart.runtime.launch.worker import Failure

pytestmark = pytest.mark.timeout(150)

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Two processes that live across tests; each failure that ends them forks new ones."""
    with Workers(2, timeout=100) as pool:
        yield pool


@pytest.fixture(scope="module")
def new(workers: Workers) -> Iterator[Workers]:
    """Two processes that are started as `launch` starts them."""
    with Workers(2, timeout=100, new=True) as pool:
        yield pool


def gone(pid: int) -> bool:
    """Whether no process has this id: ended, and waited for by its parent."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_results_come_back_by_rank_from_the_environment_that_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    results = launch(jobs.double_with_environment, 2, 21, timeout=100)
    assert [r[:2] for r, _ in results] == [(0, 42), (1, 42)]
    assert all(gone(pid) for (_, _, pid), _ in results)
    first, second = (seen for _, seen in results)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == "127.0.0.1" and first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["OMP_NUM_THREADS"] == "5"
    assert first["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert dict(os.environ) == before


@pytest.mark.slow
def test_threads_are_shared_out_and_close_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    pool = Workers(2, timeout=100, new=True)
    threads = {int(seen["OMP_NUM_THREADS"]) for seen in pool.run(jobs.environment)}
    assert threads == {max(1, len(os.sched_getaffinity(0)) // 2)}
    pids = pool.pids
    pool.close()
    pool.close()  # the second time there is nothing to do
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_workers_live_on(workers: Workers) -> None:
    first = workers.run(jobs.double, 1)
    second = workers.run(jobs.double, 2)
    assert [r[2] for r in first] == [r[2] for r in second] == workers.pids


def test_groups_open_again_and_again(workers: Workers) -> None:
    pids = [r[2] for r in workers.run(jobs.double, 1)]
    for leave in (True, True, False, False, True, True):
        assert workers.run(jobs.sum_of_ranks, leave) == [1, 1]
    assert workers.pids == pids


def test_the_store_changes_when_all_have_left_the_group(workers: Workers) -> None:
    workers.run(jobs.sum_of_ranks, False)
    held = workers.run(jobs.environment)[0]["MASTER_PORT"]
    assert workers.run(jobs.environment)[0]["MASTER_PORT"] == held
    workers.run(jobs.sum_of_ranks, True)
    assert workers.run(jobs.environment)[0]["MASTER_PORT"] != held


DIED = "rank 1 (stage 1) died: killed by signal 9 (SIGKILL)"


def fail(workers: Workers, tmp_path: Path, kind: str, wait: str) -> AutopartError:
    """Rank 1 fails while rank 0 waits in a way; returns what is raised, by when all processes have ended."""
    pids = [r[2] for r in workers.run(jobs.double, 1)]
    stamp = tmp_path / "stamp"
    with pytest.raises(AutopartError) as caught:
        workers.run(jobs.fail_on, 1, kind, wait, str(stamp))
    assert time.monotonic() - float(stamp.read_text()) <= 5
    assert all(gone(pid) for pid in pids) and workers.pids == []
    assert "1F0 forward of micro-batch 0" in caught.value.where
    return caught.value


@pytest.mark.parametrize(
    ("kind", "wait", "says"),
    [
        ("kill", "gloo", DIED),
        pytest.param("kill", "event", DIED, marks=pytest.mark.slow),
        pytest.param("kill", "spin", DIED, marks=pytest.mark.slow),
        ("exit", "gloo", "rank 1 (stage 1) died: exited with code 7"),
        pytest.param("sys.exit", "event", "rank 1 (stage 1) raised SystemExit: 3", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_ends_ends_all(new: Workers, tmp_path: Path, kind: str, wait: str, says: str) -> None:
    error = fail(new, tmp_path, kind, wait)
    assert type(error) is WorkerError
    assert error.what.startswith(says)


def test_one_of_our_errors_ends_all_and_keeps_its_parts(workers: Workers, tmp_path: Path) -> None:
    error = fail(workers, tmp_path, "stage", "gloo")
    assert type(error) is StageError
    assert error.what == "op boom raised"
    assert error.where == "model.3, rank 1 (stage 1), 1F0 forward of micro-batch 0"
    assert (error.why, error.fix) == ("because", "do not")
    assert "_fail" in error.__notes__[0]


@pytest.mark.slow
def test_another_error_ends_all_and_carries_its_traceback(workers: Workers, tmp_path: Path) -> None:
    error = fail(workers, tmp_path, "value", "spin")  # nothing but a signal ends the other rank
    assert type(error) is WorkerError
    assert error.what.startswith("rank 1 (stage 1) raised ValueError: boom")
    assert re.search(r"launch_jobs\.py.*in _fail", str(error))


@pytest.mark.parametrize("late_s", [0.0, 3.0])
def test_the_cause_wins_over_its_effects(workers: Workers, late_s: float) -> None:
    with pytest.raises(WorkerError, match="rank 1 raised ValueError: the cause"):
        workers.run(jobs.effect_and_cause, late_s)


def test_the_first_cause() -> None:
    def failure(rank: int, priority: int, at: float) -> Failure:
        return Failure(rank, "ValueError", "", "", b"", priority, at)

    killed, aborted = Death(3, -signal.SIGKILL, 5.0), Death(4, -signal.SIGABRT, 4.0)
    effect, early, late = failure(0, 2, 1.0), failure(1, 0, 2.0), failure(2, 0, 3.0)
    assert first_cause([effect, late, early, killed, aborted]) is early
    assert first_cause([effect, aborted, killed]) is killed
    assert first_cause([effect, aborted]) is aborted
    assert first_cause([effect]) is effect
    assert first_cause([worker.READY]) is None
    named = Failure(0, "WorkerError", "", "", b"x", 2, 1.0)
    told = replace(named, told_by=3)
    assert not is_explained([]) and not is_explained([effect]) and not is_explained([effect, aborted])
    assert is_explained([effect, early]) and is_explained([killed]) and is_explained([effect, named])
    assert not is_explained([told, effect]) and is_explained([told, replace(effect, rank=3)])


def test_ctrl_c_is_left_to_the_parent(new: Workers) -> None:
    assert new.run(jobs.interrupt_self) == [0, 1]


def test_the_same_error_everywhere_leaves_workers_alive(workers: Workers) -> None:
    pids = [r[2] for r in workers.run(jobs.double, 1)]
    with pytest.raises(BatchError, match="the batch has 3 rows"):
        workers.run(jobs.same_error)
    assert workers.pids == pids == [r[2] for r in workers.run(jobs.double, 1)]


def test_different_errors_start_new_workers(workers: Workers) -> None:
    pids = [r[2] for r in workers.run(jobs.double, 1)]
    with pytest.raises(WorkerError, match=r"rank \d raised ValueError: rank \d fails"):
        workers.run(jobs.different_errors)
    assert not set(pids) & {r[2] for r in workers.run(jobs.double, 1)}


def test_a_dead_worker_is_seen_though_its_forked_child_holds_its_pipes(new: Workers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(WorkerError, match="rank 0 died: killed by signal 9"):
            new.run(jobs.forked_child_holds_pipes, port)
        server.settimeout(10)
        server.accept()[0].close()  # lets the forked child end


@pytest.mark.parametrize("status", [0, 3])
def test_a_forked_child_that_exits_is_not_taken_for_its_rank(new: Workers, status: int) -> None:
    assert new.run(jobs.forked_child_exits, status) == [status] * new.world


def test_timeout_says_what_each_rank_did(workers: Workers) -> None:
    pids = [r[2] for r in workers.run(jobs.double, 1)]
    with Workers(2, timeout=100) as pool:
        pool.run(jobs.double, 1)
        pool.timeout = 1
        with pytest.raises(WorkerError) as caught:
            pool.run(jobs.activity_forever)
        assert pool.pids == []
    assert caught.value.what == "no answer in time from rank 1 (stage 1) while running activity_forever"
    assert "rank 1 (stage 1): waiting for a batch" in caught.value.why
    assert "rank 0 (stage 0): finished" in caught.value.why
    assert not any(gone(pid) for pid in pids)


def test_timeout_covers_the_start() -> None:
    with pytest.raises(WorkerError, match="no answer in time from rank 0, rank 1 while starting"):
        launch(jobs.double, 2, 1, timeout=0.01)


@pytest.mark.parametrize("what", [lambda: None, gone.__get__(threading.Lock())])
def test_functions_that_cannot_be_sent(what: object) -> None:
    with pytest.raises(UsageError, match=r"top level of a file") as caught:
        launch(what, 2)  # type: ignore[arg-type]
    assert '__name__ == "__main__"' in caught.value.fix


def test_functions_that_workers_cannot_import(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = types.ModuleType("ghost_module")
    exec("def here_alone(): pass", ghost.__dict__)
    monkeypatch.setitem(sys.modules, "ghost_module", ghost)
    with pytest.raises(UsageError, match="cannot load here_alone") as caught:
        workers.run(ghost.here_alone)
    assert "ghost_module" in caught.value.why
    assert workers.pids  # the same refusal on every rank


def test_results_that_cannot_be_sent(workers: Workers) -> None:
    with pytest.raises(UsageError, match=r"the result of unpicklable on rank \d cannot be sent"):
        workers.run(jobs.unpicklable)


@pytest.mark.parametrize("world", [0, -1, 1.5, True, "2"])
def test_world_must_be_a_count(world: object) -> None:
    with pytest.raises(UsageError, match="the number of ranks"):
        launch(jobs.double, world, 1)  # type: ignore[arg-type]


def test_under_torchrun_the_function_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch(jobs.double, 2, 4) == [(1, 8, os.getpid())]


def test_under_torchrun_the_number_of_ranks_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["my train.py", "--lr", "1"])
    with pytest.raises(ClusterError, match="2 ranks run, but 4 were asked for") as caught:
        launch(jobs.double, 4, 1)
    assert caught.value.fix == "torchrun --standalone --nproc-per-node 4 'my train.py' --lr 1"


@pytest.fixture
def status() -> Iterator[SharedStatus]:
    """Where this process publishes what it does, as a worker does."""
    status = SharedStatus()
    publish_to(status)
    yield status
    publish_to(None)


def test_label_and_note_go_nowhere_outside_of_a_launch(status: SharedStatus) -> None:
    set_rank_label("stage 0")
    set_activity("forward")
    publish_to(None)
    set_rank_label("stage 1")
    set_activity("backward")
    assert (status.label, status.note) == (b"stage 0", b"forward")


def test_notes_are_cut_to_their_memory(status: SharedStatus) -> None:
    set_rank_label("é" * 1000)
    set_activity("x" * 1000)
    assert len(status.label) == LABEL_BYTES - 1 and len(status.note) == NOTE_BYTES - 1


@pytest.mark.parametrize(
    ("error", "effect"),
    [
        (WorkerError("rank 0 died"), True),
        (ConnectionResetError(), True),
        (RuntimeError("Connection closed by peer"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("Connection closed by peer"), False),
        (StageError("op x raised"), False),
    ],
)
def test_effects_are_told_from_causes(error: BaseException, effect: bool) -> None:
    assert worker.is_effect(error) is effect
    wrapper = StageError("op y raised")
    wrapper.__cause__ = error
    assert worker.is_effect(wrapper) is effect


IMPORTS = "from support.jobs.failures import launch_jobs as jobs\nfrom autopart.runtime.launch.local import launch\n"
SCRIPT = """
import signal, sys, threading
from support.jobs.failures import launch_jobs as jobs
from autopart.runtime.launch.local import launch

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    call = lambda: launch(jobs.announce_and_wait, 2, int(sys.argv[1]))
    if sys.argv[2] == "thread":
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    else:
        call()
"""


def start_script(path: Path, text: str, *args: str) -> subprocess.Popen[str]:
    """Run a script that can import the jobs, in a process of its own."""
    path.write_text(text)
    known = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"PYTHONPATH": known}
    return subprocess.Popen([sys.executable, str(path), *args], env=env, text=True, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("by", "sent"),
    [("thread", "SIGKILL"), *(pytest.param("main", sent, marks=pytest.mark.slow) for sent in ("SIGKILL", "SIGTERM"))],
)
def test_workers_die_with_their_parent(tmp_path: Path, by: str, sent: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(100)
        parent = start_script(tmp_path / "script.py", SCRIPT, str(server.getsockname()[1]), by)
        lines = [server.accept()[0] for _ in range(2)]
        assert all(line.recv(100).strip().isdigit() for line in lines)
        parent.send_signal(signal.Signals[sent])
        _assert_closed_within(lines, 5)
        parent.communicate(timeout=10)


def test_ctrl_c_ends_the_workers_and_is_raised_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(100)
        parent = start_script(tmp_path / "script.py", SCRIPT, str(server.getsockname()[1]), "main")
        lines = [server.accept()[0] for _ in range(2)]
        for line in lines:  # a terminal sends it to all processes
            os.kill(int(line.recv(100)), signal.SIGINT)
        parent.send_signal(signal.SIGINT)
        _assert_closed_within(lines, 5)
        errors = parent.communicate(timeout=10)[1]
    assert parent.returncode == -signal.SIGINT
    assert errors.count("KeyboardInterrupt") == 1


def _assert_closed_within(lines: list[socket.socket], seconds: float) -> None:
    """The kernel closes a process's sockets when it ends."""
    end = time.monotonic() + seconds
    for line in lines:
        line.settimeout(max(0.01, end - time.monotonic()))
        with line:
            assert line.recv(1) == b""


@pytest.mark.slow
def test_a_script_without_guard_is_told_so_once(tmp_path: Path) -> None:
    script = IMPORTS + "launch(jobs.double, 2, 1)\n"
    process = start_script(tmp_path / "unguarded.py", script)
    errors = process.communicate(timeout=100)[1]
    assert process.returncode == 1
    assert errors.count("Traceback") == 1
    assert 'if __name__ == "__main__"' in errors


@pytest.mark.slow
def test_a_script_that_workers_cannot_import(tmp_path: Path) -> None:
    script = (
        IMPORTS + 'if __name__ == "__main__":\n    launch(jobs.double, 1, 1)\nelse:\n    raise OSError("not twice")\n'
    )
    errors = start_script(tmp_path / "fragile.py", script).communicate(timeout=100)[1]
    assert "OSError: not twice" in errors
    assert "rank 0 did not start: exited with code 1" in errors

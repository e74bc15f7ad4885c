"""One process per rank and row, so that a row that fails or hangs leaves nothing behind for the next one.

torchrun starts the ranks once. Each rank then starts a process for every row and ends it at the row's time limit. The
ranks exchange the results through the launcher's store, so that all of them end a row in which one failed and continue
with the next one together.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import PrefixStore, Store

from autopart.launcher import launcher_variables
from autopart.runtime.group.rendezvous import launchers_store
from benchmarks.gpu.jobs import FOLLOWED, Answer, reason

Work = Callable[..., Answer]
POLL_S = 0.05
GRACE_S = 5.0
"""Seconds that a rank may continue after another one failed, to report its own error."""


class Pool:
    """The processes of this rank. Every rank runs the same work in the same order.

    rank, world: of the launch; local: ranks of this host. Without a launcher there is one rank.
    """

    def __init__(self) -> None:
        os.environ.update(launcher_variables(os.environ))
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self._rows = 0
        self._store: Store | None = None
        if self.world > 1:
            self._store = PrefixStore("rows", launchers_store(60.0)[0])

    def run(self, work: Work, *args: Any, limit_s: float) -> list[Answer]:
        """Run work(*args) on every rank and return the results by rank; {"reason": ...} for one that failed or timed
        out.

        Collective. The result of `work` must be serializable as JSON.
        """
        self._rows += 1
        env = {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.local),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"), "MASTER_PORT": self._port(),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        }  # fmt: skip
        fork = multiprocessing.get_context("fork")  # everything is imported and this process has not used CUDA
        conn, child_conn = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(child_conn, env, work, args), daemon=True)
        process.start()
        child_conn.close()
        try:
            return self._exchanged(self._await(process, conn, limit_s), limit_s)
        finally:  # after all ranks are done: rank 0's child has the store of the row
            process.kill()
            process.join()
            conn.close()

    def _port(self) -> str:
        """Return a free port of rank 0's host for the row's ranks."""
        if self._store is None:
            return _free_port()
        key = f"{self._rows}/port"
        if self.rank == 0:
            self._store.set(key, _free_port())
        return self._store.get(key).decode()

    def _await(self, process: BaseProcess, conn: Connection, limit_s: float) -> Answer:
        """Return this rank's answer, or the reason why there is none."""
        end, patience = time.monotonic() + limit_s, False
        while True:
            if conn.poll(POLL_S):
                try:
                    answer: Answer = json.loads(conn.recv())
                except EOFError:
                    process.join(GRACE_S)
                    answer = {"reason": f"the process died (exit code {process.exitcode})"}
                if "reason" in answer and not answer.get("stays"):
                    self._tell_failure()
                return answer
            if time.monotonic() > end:
                if not patience:
                    self._tell_failure()
                return {"reason": FOLLOWED if patience else f"ended after {limit_s:g} s", "late": True}
            if not patience and self._store is not None and self._store.check([f"{self._rows}/failed"]):
                end, patience = min(end, time.monotonic() + GRACE_S), True

    def _tell_failure(self) -> None:
        if self._store is not None:
            self._store.set(f"{self._rows}/failed", "1")

    def _exchanged(self, answer: Answer, limit_s: float) -> list[Answer]:
        if self._store is None:
            return [answer]
        self._store.set(f"{self._rows}/{self.rank}", json.dumps(answer))
        end = time.monotonic() + limit_s + GRACE_S + 60
        keys = [f"{self._rows}/{rank}" for rank in range(self.world)]
        while not self._store.check(keys):
            if time.monotonic() > end:
                raise TimeoutError(f"some ranks did not answer in row {self._rows}")
            time.sleep(POLL_S)
        return [json.loads(self._store.get(key)) for key in keys]


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("", 0))
        return str(found.getsockname()[1])


def _child(conn: Connection, env: dict[str, str], work: Work, args: tuple[Any, ...]) -> None:
    """Run a row's work. The process is killed afterwards: objects inherited from the parent must not be closed here."""
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    warnings.simplefilter("ignore")  # torch's internal warnings
    os.environ.update(env)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the rows have a separate store
    try:
        answer = work(*args)
    except BaseException as error:
        answer = {"reason": reason(error)}
    conn.send(json.dumps(answer))
    threading.Event().wait()  # until it is killed


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)

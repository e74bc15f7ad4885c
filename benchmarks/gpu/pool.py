"""One process for each rank and row, so that a row which fails or hangs leaves nothing behind for the next.

torchrun starts the ranks once; each of them then starts a process for every row, in which the row runs, and ends it at
the row's limit.  All ranks tell each other what became of it through the store of the launch, so that all end a row
that one of them failed, and go on with the next together.
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
from gpu.jobs import FOLLOWED, Answer, reason

Work = Callable[..., Answer]
POLL_S = 0.05
GRACE_S = 5.0
"""So long a rank may go on after another one failed, to say what it makes of it."""


class Pool:
    """The processes of this rank; every rank has one, and asks the same of it in the same order.

    rank, world: of the launch; local: ranks of this host.  Without a launcher there is one rank.
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
        """What work(*args) returns on every rank, by rank; {"reason": ...} for a rank that failed or ran out of time.
        Collective.  work and what it returns are plain: the latter is sent as JSON."""
        self._rows += 1
        env = {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.local),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"), "MASTER_PORT": self._port(),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        }  # fmt: skip
        fork = multiprocessing.get_context("fork")  # all is imported already; nobody has touched CUDA here
        conn, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_child, args=(theirs, env, work, args), daemon=True)
        process.start()
        theirs.close()
        try:
            return self._exchanged(self._await(process, conn, limit_s), limit_s)
        finally:  # not before all ranks are done: the first one's process has the store of the row
            process.kill()
            process.join()
            conn.close()

    def _port(self) -> str:
        """Where the ranks of this row meet: a free port of the first rank's host."""
        if self._store is None:
            return _free_port()
        key = f"{self._rows}/port"
        if self.rank == 0:
            self._store.set(key, _free_port())
        return self._store.get(key).decode()

    def _await(self, process: BaseProcess, conn: Connection, limit_s: float) -> Answer:
        """This rank's answer, or why there is none."""
        end, patience = time.monotonic() + limit_s, False
        while True:
            if conn.poll(POLL_S):
                try:
                    said: Answer = json.loads(conn.recv())
                except EOFError:
                    process.join(GRACE_S)
                    said = {"reason": f"the process died (exit code {process.exitcode})"}
                if "reason" in said and not said.get("stays"):
                    self._tell_failure()
                return said
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
                raise TimeoutError(f"some ranks said nothing of row {self._rows}")
            time.sleep(POLL_S)
        return [json.loads(self._store.get(key)) for key in keys]


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("", 0))
        return str(found.getsockname()[1])


def _child(conn: Connection, env: dict[str, str], work: Work, args: tuple[Any, ...]) -> None:
    """Body of a row's process.  It ends without ceremony: objects of the parent are not this process's to close."""
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    warnings.simplefilter("ignore")  # torch's to itself, once a row and rank
    os.environ.update(env)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the rows have a store of their own
    try:
        said = work(*args)
    except BaseException as error:
        said = {"reason": reason(error)}
    conn.send(json.dumps(said))
    threading.Event().wait()  # to be killed


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)

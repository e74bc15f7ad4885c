"""A store in a process of its own, and ranks that send heartbeats to it and read each other's."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection

from torch.distributed import TCPStore

from autopart.runtime.watch.heart import Heart


def serve(connection: Connection) -> None:
    """Hold a store, and answer with the processor time that this took so far."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    connection.send(store.port)
    while connection.recv():
        connection.send(time.process_time())


def wait(port: int, ranks: range, size: int, limit_s: float, connection: Connection) -> None:
    """Send the heartbeats of these ranks and read those of the next two each, as ranks that wait."""
    hearts = []
    for rank in ranks:
        store = TCPStore(
            "127.0.0.1", port, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=limit_s)
        )
        heart = Heart(store, rank, size, 0)
        heart.enter("group")
        heart.wanted, heart.curious = {(rank + 1) % size, (rank + 2) % size}, True
        hearts.append(heart)
    connection.send("waiting")
    connection.recv()
    wanted = [(heart, rank) for heart in hearts for rank in heart.wanted]
    connection.send(max(heart.silent_s(rank) if rank in heart.seen else 1e9 for heart, rank in wanted))
    connection.recv()
    os._exit(0)

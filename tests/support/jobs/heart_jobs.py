"""A store in a process of its own, and ranks that send heartbeats to it and read each other's."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from unittest import mock

from torch.distributed import TCPStore

from autopart.runtime.watch.heart import BEAT_S, READ_S, Heart


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

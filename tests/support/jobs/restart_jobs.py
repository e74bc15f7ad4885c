"""Functions that the tests of restarts run in worker processes; each looks at how often the ranks were restarted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from autopart.launcher import restart_count
from autopart.runtime.group.rendezvous import launchers_store


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

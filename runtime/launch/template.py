"""What multiprocessing's fork server imports so that ranks which are forked from it start in milliseconds, not seconds.

To import this file is to become the process that ranks are forked from; only the fork server does (`starting.forked`).
It never imports the user's script and runs nothing, so it has one thread and no device.  Signals that all processes of
a job get are left to the ranks.  It ends with the launcher, and its ranks with it (prctl).
"""

from __future__ import annotations

import gc
import os
import signal
from importlib import import_module

from autopart.runtime.launch import worker
from autopart.runtime.launch.starting import TIED_VARIABLE

_IMPORTED = (
    "autopart.api", "torch.export._trace", "torch._dynamo",  # by `compile`, which takes longer than a small model
    "multiprocessing.popen_forkserver", "multiprocessing.sharedctypes",  # by a process that is forked
)  # fmt: skip
_SERVER = os.getpid()
_LEFT_TO_RANKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def _begin() -> None:
    """Undo in a process that the fork server has forked what only the server needs."""
    if os.getppid() == _SERVER:  # not in what a rank forks
        gc.unfreeze()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_RANKS)  # one that has come since the fork acts now
        worker.end_with_parent(_SERVER)


signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_RANKS)
if TIED_VARIABLE in os.environ:
    worker.end_with_parent(int(os.environ[TIED_VARIABLE]))
for _name in _IMPORTED:
    import_module(_name)
os.register_at_fork(after_in_child=_begin)
gc.collect()
gc.freeze()  # what is never looked at again stays shared

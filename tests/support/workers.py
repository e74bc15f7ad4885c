"""Local processes that live on from one call to the next, so that tests need not start them each time.

They are forked from one process for each of pytest's, which has imported what captures need: a new process takes seven
seconds of a core for that before its first capture.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from autopart.runtime.launch.reasons import error_for
from autopart.runtime.launch.starting import Starter, forked, spawned
from autopart.runtime.launch.supervise import Fleet, load_result, name_of, pickle_call
from autopart.runtime.launch.worker import Failure, Success

MODELS = ("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
"""Modules whose import brings what those of all models import."""


FORKED = functools.partial(forked, more=MODELS)
"""Starts a process of a pool."""


class Workers:
    """`world` local processes; a context manager.

    Processes start with the first `run` and again after a failure that ended them.  A torch.distributed group that a
    function leaves open is still open in the next `run`; once all have left it, the next `run` has a new store.
    """

    def __init__(self, world: int, *, timeout: float = 300.0, new: bool = False) -> None:
        """timeout: seconds for each `run`, start of processes included.  new: start new processes, as `launch` does."""
        self.world, self.timeout = world, timeout
        self._start: Starter = spawned if new else FORKED
        self._fleet: Fleet | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run fn(*args) on every rank; return the results by rank, or raise as `launch` does.

        Processes stay alive after an exception only if every rank raised the same one.
        """
        call = pickle_call(fn, args)
        if self._fleet is None or not self._fleet.members:
            self._fleet = _ReusedFleet(self.world, start=self._start)
        deadline = time.monotonic() + self.timeout  # what is forked has imported: a loaded machine may take minutes
        return self._fleet.run(call, name_of(fn), deadline)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty before the first run and after a failure that ended the processes."""
        members = self._fleet.members if self._fleet else []
        return [m.process.pid for m in members if m.process.pid is not None]

    def close(self) -> None:
        """End the processes."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


class _ReusedFleet(Fleet):
    """Processes that also live on if every rank raised the same exception, since all stand at the same point."""

    def answers(self, call: bytes, name: str, deadline: float | None) -> dict[int, Any]:
        found = super().answers(call, name, deadline)
        self._alike: BaseException | None = None
        failures = [answer for answer in found.values() if isinstance(answer, Failure)]
        same = len({(failure.kind, failure.message) for failure in failures}) == 1
        if same and len(failures) == len(self.members):
            self._alike = error_for(min(failures, key=lambda failure: failure.rank), self._statuses[0])
            found = super().answers(pickle_call(int, ()), "int", deadline)
        if sum(isinstance(answer, Success) for answer in found.values()) == len(self.members):
            self._leave_the_store(deadline)
        return found

    def run(self, call: bytes, name: str, deadline: float | None) -> list[Any]:
        results = super().run(call, name, deadline)
        if self._alike is not None:
            raise self._alike
        return results

    def _leave_the_store(self, deadline: float | None) -> None:
        """Open another store, without the keys of a group that all ranks have left."""
        inside = super().answers(pickle_call(_in_group, ()), "_in_group", deadline)
        if not any(load_result(answer) for answer in inside.values()):
            super().answers(pickle_call(_take, (self.open_store(),)), "_take", deadline)


def _in_group() -> bool:
    return dist.is_initialized()


def _take(env: Mapping[str, str]) -> None:
    os.environ.update(env)

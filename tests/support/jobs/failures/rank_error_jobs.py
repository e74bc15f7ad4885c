"""Jobs that record the error each rank raises when another rank fails, exits or stalls, in a pool of `WORLD` processes.

A rank returns the error and the time at which it was raised instead of raising it, so that the pool stays usable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import autopart
from autopart.capture import CaptureCache
from autopart.runtime.group.rendezvous import launchers_store
from support.jobs.failures import failing_jobs
from support.jobs.failures.failing_jobs import CASE, WORLD
from support.jobs.session_jobs import rank
from support.jobs.step_jobs import ALL, compiled

ROWS = 8
PLAIN = {"micro_batches": 4, "loss_fn": CASE.loss_fn, "costs": "analytic"}


class UncaughtError(BaseException):
    """An exception that no code catches by type."""


RAISED = (
    AttributeError("no such attribute"),
    MemoryError("no memory"),
    SystemExit(3),
    KeyboardInterrupt(),
    UncaughtError(),
)


def clock_s() -> float:
    """Return a time in seconds that all processes of this machine share."""
    return time.monotonic()


def error_of(call: Any) -> tuple[str, str, float]:
    """Return the type name and text of the error that a call raises, and when it was raised."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), clock_s()
    return "", "", clock_s()


def failed_capture(bad: int) -> list[tuple[str, str, float]]:
    """Return what compile raises for each error of `RAISED` when rank `bad` raises it during capture."""
    original, found = CaptureCache.__call__, []
    case = ALL["stack"]
    for error in RAISED:

        def fail(self: CaptureCache, *args: Any, error: BaseException = error) -> Any:
            if rank() == bad:
                raise error
            return original(self, *args)

        with mock.patch.object(CaptureCache, "__call__", fail):
            model = case.model()
            found.append(error_of(lambda m=model: compiled(case, m, case.batch(ROWS), stages=2, micro_batches=2)))
    return found


def failed_step(phase: str, calls: int) -> dict[str, Any]:
    """Fail the second step on the last rank and return what each rank raised.

    Then close the pipe and take a step with another pipe in the same processes.
    """
    model, batch = CASE.model(), CASE.batch(ROWS)
    options = {"cuts": failing_jobs.CUTS, **PLAIN}
    pipe = autopart.compile(model, f"cpu:{WORLD}", sample=batch, **options)
    pipe.step(batch)
    before = {name: (p.grad, p.grad.clone()) for name, p in pipe.named_parameters() if p.grad is not None}
    with failing_jobs.armed(phase, "raise", calls) if rank() == WORLD - 1 else contextlib.nullcontext():
        found: dict[str, Any] = {"failed": error_of(lambda: pipe.step(batch))}
    after = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    found["kept"] = after.keys() == before.keys() and all(
        after[name] is grad and torch.equal(grad, copy) for name, (grad, copy) in before.items()
    )
    found["again"] = error_of(lambda: pipe.step(batch))
    pipe.close()
    found["emptied"] = error_of(lambda: autopart.compile(model, f"cpu:{WORLD}", sample=batch, **options))
    with autopart.compile(CASE.model(), f"cpu:{WORLD}", sample=batch, **options) as other:
        found["loss"] = other.step(batch).item()
    return found


def failed_step_in_open_group() -> tuple[str, float, float]:
    """Fail a step in a process whose process group the user opened.

    Return the type of the error, a sum over that group afterwards, and the loss of a step of another pipe.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    pipe = autopart.compile(CASE.model(), f"cpu:{WORLD}", sample=CASE.batch(ROWS), cuts=failing_jobs.CUTS, **PLAIN)
    with failing_jobs.armed("forward", "raise", 1) if rank() == WORLD - 1 else contextlib.nullcontext():
        name = error_of(lambda: pipe.step(CASE.batch(ROWS)))[0]
    pipe.close()
    total = torch.tensor(float(rank()))
    dist.all_reduce(total)
    with autopart.compile(CASE.model(), f"cpu:{WORLD}", sample=CASE.batch(ROWS), **PLAIN) as other:
        loss = other.step(CASE.batch(ROWS)).item()
    dist.destroy_process_group()
    return name, total.item(), loss


def early_exit() -> tuple[str, str, float]:
    """Call state_dict on rank 0 alone while the other ranks return and leave the pipe open.

    Return the error and the seconds from the call until it was raised.
    """
    case = ALL["stack"]
    pipe = compiled(case, case.model(), case.batch(ROWS), stages=2, micro_batches=2)
    pipe.step(case.batch(ROWS))
    if rank() != 0:
        return "", "", 0.0
    start = clock_s()
    name, text, at = error_of(pipe.state_dict)
    return name, text, at - start


def error_in_the_script() -> tuple[str, str, float]:
    """Raise an error of the user's script on rank 1 between two steps, inside the `with` block of the pipe."""
    case = ALL["stack"]

    def run() -> None:
        with compiled(case, case.model(), case.batch(ROWS), stages=2, micro_batches=2) as pipe:
            pipe.step(case.batch(ROWS))
            if rank() == 1:
                raise ZeroDivisionError("my own mistake")
            pipe.step(case.batch(ROWS))

    return error_of(run)


def late_rank(timeout_s: float) -> tuple[str, str, float]:
    """Let rank 1 arrive late at a step, so that the other ranks time out."""
    case, store = ALL["stack"], _common()
    pipe = compiled(case, case.model(), case.batch(ROWS), stages=2, micro_batches=2, timeout=timeout_s)
    pipe.step(case.batch(ROWS))
    if rank() == 1:
        store.wait(["over"])
    start = clock_s()
    name, text, at = error_of(lambda: pipe.step(case.batch(ROWS)))
    store.set("over", "")
    pipe.close()
    return name, text, at - start


def blocked_interpreter(seconds: int) -> float:
    """Block the interpreter lock of rank 1 for some seconds and return the loss of the next step."""
    case = ALL["stack"]
    with compiled(case, case.model(), case.batch(ROWS), stages=2, micro_batches=2) as pipe:
        pipe.step(case.batch(ROWS))
        if rank() == 1:
            ctypes.PyDLL(None).sleep(seconds)
        return pipe.step(case.batch(ROWS)).item()


def slow_planning(timeout_s: float) -> float:
    """Plan on rank 0 for longer than the timeout between ranks and return the loss of a step."""
    case = ALL["stack"]
    slow: list[float] = [2 * timeout_s]

    def watch(*_: Any) -> None:
        time.sleep(slow.pop() if slow else 0.0)

    with compiled(
        case, case.model(), case.batch(ROWS), stages=2, micro_batches=2, timeout=timeout_s, watch=watch, cache=False
    ) as pipe:
        return pipe.step(case.batch(ROWS)).item()


def _common() -> Any:
    store = PrefixStore(f"tests/{os.environ['MASTER_PORT']}/late", launchers_store(60.0)[0])
    if rank() == 0:
        store.delete_key("over")
    return store

"""A model with an op that kills its process or raises at a chosen call, and the jobs that train it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.ir.errors import AutopartError
from autopart.runtime.activity import current, text_of
from autopart.runtime.stages.shard_group import ShardGroup
from autopart.runtime.stages.weight_gradients import WeightGradient
from support.models.peer_models import WIDTH, Stack, pair
from support.models.small_models import Small
from support.models.tokens.by_hand import Gpt

_armed: dict[str, Any] = {}


def _fail_if_armed(phase: str) -> None:
    """Count a call of the op in a phase and trigger the armed failure at the last one."""
    if _armed.get("phase") != phase:
        return
    _armed["calls"] -= 1
    if _armed["calls"] == 0:
        if callable(_armed["how"]):
            _armed["how"]()
            return
        if _armed["how"] == "kill":
            die(_armed["clock"])
        raise RuntimeError("the op gave up")


def _add(gradient: WeightGradient) -> None:
    """Add the gradient of a weight, unless the failure is armed for this call."""
    _fail_if_armed("weights")
    _plain_add(gradient)


_plain_add = WeightGradient.add
WeightGradient.add = _add  # type: ignore[method-assign]


def arm(phase: str, how: str | Callable[[], None], calls: int, clock: str = "") -> None:
    """Arm the op to fail at its n-th call in a phase, or in "weights" a product with a weight at the n-th one.

    how: "kill" sends SIGKILL to the process, "raise" raises an error, and a function is called.
    """
    _armed.update(phase=phase, how=how, calls=calls, clock=clock)


@contextlib.contextmanager
def armed(phase: str, how: str | Callable[[], None], calls: int) -> Iterator[None]:
    """Arm the op, and disarm it afterwards, called often enough or not: other jobs come in this process."""
    arm(phase, how, calls)
    try:
        yield
    finally:
        _armed.clear()


def die(clock: str) -> None:
    """Write the time to the file `clock` and kill this process with SIGKILL."""
    Path(clock).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


@torch.library.custom_op("autopart_tests::trouble", mutates_args=())
def trouble(x: torch.Tensor) -> torch.Tensor:
    _fail_if_armed("forward")
    return x.clone()


@torch.library.custom_op("autopart_tests::trouble_backward", mutates_args=())
def trouble_backward(grad: torch.Tensor) -> torch.Tensor:
    _fail_if_armed("backward")
    return grad.clone()


trouble.register_fake(torch.empty_like)
trouble_backward.register_fake(torch.empty_like)
trouble.register_autograd(lambda ctx, grad: trouble_backward(grad))


class Fragile(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return trouble(x)


class FailingStack(Stack):
    """Four layers, of which the third ends in the failing op."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile())


CASE = Small(FailingStack, **pair(lambda output, target: ((output - target) ** 2).mean()))
CUTS = ["layers.1", "layers.2"]
WORLD = 3


def open_pipe(schedule: str = "1f1b", **more: Any) -> autopart.Pipe:
    """Return the pipe that every job here uses.  more: options of compile."""
    torch.set_num_threads(1)
    options = {"cuts": CUTS, "micro_batches": 4, "schedule": schedule, "loss_fn": CASE.loss_fn, "costs": "analytic"}
    return autopart.compile(CASE.model(), f"cpu:{WORLD}", sample=CASE.batch(8), **(options | more))


def train_until_failure(phase: str, how: str, calls: int, clock: str, schedule: str = "1f1b") -> list[float]:
    """Train until the armed op fails on stage 2. In phase "idle", the process is killed between two steps instead."""
    pipe = open_pipe(schedule)
    if phase != "weights" or pipe.rank == 2:  # only stage 2 has the op
        arm(phase, how, calls, clock)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(CASE.batch(8)).item())
        if phase == "idle" and pipe.rank == 2:
            die(clock)
        if phase == "idle" and pipe.rank == 1:
            threading.Event().wait()  # user code that never returns
    return losses


def train_in_many_stages(phase: str, how: str, calls: int, clock: str, schedule: str) -> list[float]:
    """Train with several stages on each rank, or under an order made for the plan, until the op fails on its rank.

    how: "kill", "raise", "stop" or "hang", which never returns."""
    each = {"stages_per_rank": 2} if schedule in ("zb-v", "interleaved") else {}
    limit = 2 if how == "hang" else None
    with open_pipe(schedule, cuts=None, recompute="off", timeout=limit, micro_batches=3, **each) as pipe:
        actions = {"kill": "kill", "raise": "raise", "stop": partial(_stop, clock), "hang": partial(_hang, clock)}
        mine = [s for s in pipe.plan.stages if pipe.rank in s.ranks and any("trouble" in op for op in s.ops)]
        if mine or phase != "weights":
            arm(phase, actions[how], calls, clock)
        return [pipe.step(CASE.batch(9)).item() for _ in range(3)]


def train_together(where: str, how: str, clock: str) -> list[float]:
    """Train two stages of two ranks that compute together, until the last one fails inside of an exchange.

    where: the compute, such as "1B0".  how: "kill", "stop" or "hang"."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(0, 24, (8, 8), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "schedule": "1f1b", "costs": "analytic"}
    limit = 2 if how == "hang" else None
    with autopart.compile(
        Gpt(), "cpu:4", sample=(ids, ids), tensor_parallel=2, replicas=1, timeout=limit, **options
    ) as pipe:
        losses = [pipe.step(ids, ids).item()]
        fail, plain = {"kill": die, "stop": _stop, "hang": _hang}[how], ShardGroup._group

        def group(members: ShardGroup) -> Any:  # of each exchange
            if text_of(current().note).startswith(where):
                fail(clock)
            return plain(members)

        if pipe.rank == 3:
            ShardGroup._group = group  # type: ignore[method-assign]
        return [*losses, *(pipe.step(ids, ids).item() for _ in range(2))]


def die_in_a_call(call: str, folder: str, clock: str) -> None:
    """Save, and kill the last of two stages of two ranks that compute together, inside of a call.

    call: "save", "load" or "adopt"."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ids = torch.randint(0, 24, (8, 8), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"sample": (ids, ids), "micro_batches": 2, "costs": "analytic", "replicas": 1}
    with autopart.compile(Gpt(), "cpu:4", tensor_parallel=2, stages=2, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(ids, ids)
        optimizer.step()
        pipe.save(folder, optimizer)
        pipe.step(ids, ids)
        other = autopart.plan(Gpt(), "cpu:4", tensor_parallel=4, stages=1, **options)
        if pipe.rank == 3:
            module, name = {"save": (os, "fsync"), "load": (os, "open"), "adopt": (dist, "irecv")}[call]
            setattr(module, name, lambda *given, **named: die(clock))
        {"save": pipe.save, "load": pipe.load, "adopt": partial(pipe.adopt, other)}[call](
            *([optimizer] if call == "adopt" else [folder, optimizer])
        )


def _stop(clock: str) -> None:
    Path(clock).write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(clock: str) -> None:
    Path(clock).write_text(repr(time.monotonic()))
    threading.Event().wait()


def healthy_step() -> float:
    """Return the loss of a step in which no failure is armed."""
    _armed.clear()
    return open_pipe().step(CASE.batch(8)).item()


class Swelling(nn.Module):
    """Two layers, of which the second needs 16 MB for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).unsqueeze(-1).expand(-1, -1, 4_000_000).contiguous().mean(-1)


def without_memory() -> str:
    """Return the error of a step for which stage 1 gets no memory."""
    sample = torch.ones(8, 4), torch.ones(8, 4)
    options = {"cuts": ["second"], "micro_batches": 2, "loss_fn": nn.functional.mse_loss, "costs": "analytic"}
    pipe = autopart.compile(Swelling(), "cpu:2", sample=sample, **options)
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if pipe.rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (100 << 20), before[1]))
        pipe.step(sample)
    except AutopartError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        pipe.close(sync=False)
    return ""


def exit_in_step(clock: str) -> None:
    """Exit rank 1 with a nonzero code in the middle of a step."""
    pipe = open_pipe()
    pipe.step(CASE.batch(8))
    if pipe.rank == 1:
        Path(clock).write_text(repr(time.monotonic()))
        os._exit(3)
    pipe.step(CASE.batch(8))

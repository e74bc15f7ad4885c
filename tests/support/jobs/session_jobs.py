"""Jobs of the tests of sessions, which run on every rank of a pool.

A job that fails on only some ranks returns the error instead of raising it, because a pool ends when ranks raise
different errors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import autopart
from autopart.capture import CaptureCache
from autopart.ir.errors import AutopartError
from autopart.runtime.group.rendezvous import launchers_store
from autopart.runtime.group.world import World
from autopart.runtime.tensors import broadcast_weights_if_different
from support.jobs.step_jobs import ALL, compiled, fresh, refusal_of
from support.jobs.training_jobs import relative
from support.oracles.one_process import plain_step

ROWS = 8
Adoptions = Mapping[int, autopart.Plan]
"""Plans to adopt, by the number of the step that follows."""


def rank() -> int:
    return int(os.environ["RANK"])


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum, which has state and, unlike Adam, does not amplify gradients near zero."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(name: str, first: autopart.Plan, adoptions: Adoptions, steps: int, renew: bool = True) -> Any:
    """Train with SGD and return the losses, what this rank holds after each adoption, the state and an evaluation loss.

    renew: create a new optimizer after each adoption, as the documentation requires.
    """
    case = ALL[name]
    with compiled(case, fresh(name), case.batch(ROWS), plan=first, costs="auto") as pipe:
        optimizer = sgd(pipe.parameters())
        losses, held = [], []
        for step in range(steps):
            if step in adoptions:
                pipe.adopt(adoptions[step])
                held.append({n for n, p in pipe.named_parameters() if p.numel()})
                if renew:
                    optimizer = sgd(pipe.parameters())
            losses.append(pipe.step(case.batch(ROWS)).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, held, pipe.state_dict(), pipe.eval_loss(case.batch(ROWS)).item()


def trained_alone(name: str, micros: Mapping[int, int], steps: int) -> Any:
    """Train in one process and return the losses and the state.

    micros: numbers of micro-batches by the first step that uses them.
    """
    case = ALL[name]
    model = case.model()
    losses = []
    for step in range(steps):
        if step in micros:
            count, optimizer = micros[step], sgd(model.parameters())
        losses.append(plain_step(case, model, case.batch(ROWS), count).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def accumulated(name: str, first: autopart.Plan, second: autopart.Plan) -> Any:
    """Accumulate gradients under two plans.

    Return whether adopting kept the gradients, parameters that have one without being held here, and the largest error.
    """
    case = ALL[name]
    captures, reference = fresh(name), case.model()
    with compiled(case, captures, case.batch(ROWS), plan=first, costs="auto") as pipe:
        pipe.step(case.batch(ROWS))
        before = pipe.gradients()
        pipe.adopt(second)
        moved = pipe.gradients()
        pipe.step(case.batch(ROWS))
        found, held = pipe.gradients(), {n: p for n, p in pipe.named_parameters() if p.numel()}
    for _ in range(2):
        plain_step(case, reference, case.batch(ROWS), 1)
    same = all(torch.equal(moved[n], g) for n, g in before.items() if g is not None)
    left = [n for n, p in captures.model.named_parameters() if n not in held and p.grad is not None]
    errors = {n: relative(found[n], p.grad) for n, p in reference.named_parameters() if p.grad is not None}
    return same, left, max(errors.values())


def refused_plan(name: str, first: autopart.Plan, other: autopart.Plan) -> Any:
    """Return the error of adopting a plan that does not fit and the loss of the next step."""
    case = ALL[name]
    with compiled(case, fresh(name), case.batch(ROWS), plan=first, costs="auto") as pipe:
        return refusal_of(lambda: pipe.adopt(other)), pipe.step(case.batch(ROWS)).item(), pipe.plan == first


class Broken(Exception):
    """An exception type that autopart never raises."""


def failing_capture(bad: int, ours: bool) -> BaseException | None:
    """Return what compile raises when capture fails on rank `bad`. The process group must stay as it was.

    ours: whether the failure is an error of autopart.
    """
    original = CaptureCache.__call__

    def fail(self: CaptureCache, *args: Any) -> Any:
        if rank() != bad:
            return original(self, *args)
        if ours:
            raise autopart.CaptureError("cannot be captured", where="module a")
        raise Broken("an unexpected error")

    case = ALL["stack"]
    open_before = dist.is_initialized()
    with mock.patch.object(CaptureCache, "__call__", fail):
        try:
            compiled(case, case.model(), case.batch(ROWS), stages=2, micro_batches=2)
        except Exception as error:
            assert dist.is_initialized() == open_before
            return error
    return None


def failing_later(bad: int) -> Any:
    """Return what a step raises when rank `bad` passes an invalid batch, and the loss of the next step."""
    case = ALL["stack"]
    with compiled(case, fresh("stack"), case.batch(ROWS), stages=2, micro_batches=2) as pipe:
        rows = 1 if rank() == bad else 6
        return refusal_of(lambda: pipe.step(case.batch(rows))), pipe.step(case.batch(ROWS)).item()


def refused() -> bool:
    """Return whether a refused compile leaves no process group open."""
    case = ALL["stack"]
    error = refusal_of(lambda: compiled(case, case.model(), case.batch(ROWS), cuts=["no.such.module"]))
    return error is not None and not dist.is_initialized()


def one_step(leave_open: bool) -> float:
    """Return the loss of a step of a new pipe."""
    case = ALL["stack"]
    pipe = compiled(case, fresh("stack"), case.batch(ROWS), stages=2, micro_batches=2)
    loss = pipe.step(case.batch(ROWS)).item()
    if not leave_open:
        pipe.close()
    return loss


def two_at_once() -> tuple[float, float, bool]:
    """Return losses before and after another open pipe is closed, and whether closing both ends the process group."""
    case = ALL["stack"]
    first = compiled(case, fresh("stack"), case.batch(ROWS), stages=2, micro_batches=2)
    second = compiled(case, case.model(), case.batch(ROWS), stages=1, micro_batches=2)
    before = second.step(case.batch(ROWS)).item()
    first.close()
    after = second.step(case.batch(ROWS)).item()
    second.close()
    return before, after, not dist.is_initialized()


def groups_of_a_closed_world() -> tuple[bool, float]:
    """Return whether closing a world ends its groups, and a sum over the ranks of a world that stays open."""
    first = World("cpu", int(os.environ["WORLD_SIZE"]))
    second = World("cpu", first.size)
    group = second.group((0, 1))
    second.group(range(second.size))  # the group of all ranks is shared and stays open
    known = group in dist.distributed_c10d._world.pg_map
    second.close()
    ended = known and group not in dist.distributed_c10d._world.pg_map
    total = sum(row[0] for row in first.gather_numbers([float(rank())]))
    first.begin_moving(torch.ones(1), 0, 1)()
    first.close()
    return ended, total


def open_after_absence(absent: int, patience_s: int) -> tuple[str, str]:
    """Return the results of opening the group while one rank stays away, and with all ranks after that."""
    minute = timedelta(seconds=60)
    store = PrefixStore("tests", launchers_store(60.0)[0])
    first = _open(patience_s) if rank() != absent else ""
    store.set(f"tried/{rank()}", "")
    store.wait([f"tried/{other}" for other in range(int(os.environ["WORLD_SIZE"]))], minute)
    return first, _open(60)


def _open(timeout_s: int) -> str:
    """Open the process group, sum up the ranks and close it."""
    with mock.patch.dict(os.environ, {"AUTOPART_TIMEOUT_S": str(timeout_s)}):
        try:
            world = World("cpu", int(os.environ["WORLD_SIZE"]))
        except AutopartError as error:
            return str(error)
    total = sum(row[0] for row in world.gather_numbers([float(rank())]))
    world.close()
    return f"sum {total:g}"


def texts() -> bool:
    """Return whether texts and JSON of any size arrive unchanged."""
    world = World("cpu", int(os.environ["WORLD_SIZE"]))
    mine = ["", "é" * rank(), "x" * (rank() * 2**20)]
    expected = [["" for _ in range(world.size)]]
    expected += [[letter * (r * factor) for r in range(world.size)] for letter, factor in (("é", 1), ("x", 2**20))]
    good = [world.gather_objects(text) for text in mine] == expected
    content = {"long": "ü" * 2**20, "none": None, "number": 1.5}
    good &= world.broadcast_object(content if rank() == 1 else None, 1) == content
    world.close()
    return good


def broadcast_weights() -> Any:
    """Broadcast weights that differ on one rank only in their order, beside equal ones.

    Return the received weights and the warnings.
    """
    world = World("cpu", int(os.environ["WORLD_SIZE"]))
    permuted = torch.tensor([2.0, 1.0, 3.0] if rank() == 1 else [1.0, 2.0, 3.0])
    same = {"nan": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0), "number": torch.tensor(3)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        broadcast_weights_if_different(world, {**same, "permuted": permuted})
    world.close()
    return permuted.tolist(), [str(warning.message) for warning in seen]

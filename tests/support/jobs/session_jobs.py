"""What the tests of sessions run on every rank of a pool; importable there by name.

A job that fails on some ranks only returns what was raised: a pool ends when ranks raise different errors.
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
from support.jobs.step_jobs import ALL, compiled, fresh
from support.jobs.training_jobs import relative
from support.oracles.one_process import plain_step

ROWS = 8
Adoptions = Mapping[int, autopart.Plan]
"""Plans to go on under, by the step before which they are adopted."""


def rank() -> int:
    return int(os.environ["RANK"])


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer with a state, which leaves a gradient that is zero in theory small."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(name: str, first: autopart.Plan, adoptions: Adoptions, steps: int, renew: bool = True) -> Any:
    """Losses of steps of SGD with momentum, what this rank holds after each adoption, and the state at the end.

    renew: make a new optimizer after an adoption, as the documentation asks for.
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
    """The same in one process; micros: numbers of micro-batches by the step from which they hold."""
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
    """Errors of gradients that were accumulated under two plans, and whether only holders have one."""
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
    """What adopting a plan for something else raises, and the loss of the next step."""
    case = ALL[name]
    with compiled(case, fresh(name), case.batch(ROWS), plan=first, costs="auto") as pipe:
        try:
            pipe.adopt(other)
            error = None
        except AutopartError as raised:
            error = raised
        return error, pipe.step(case.batch(ROWS)).item(), pipe.plan == first


class Broken(Exception):
    """What no code of ours raises."""


def failing_capture(bad: int, ours: bool) -> BaseException | None:
    """What compile raises when capturing fails on one rank; it leaves the process group as it was."""
    original = CaptureCache.__call__

    def fail(self: CaptureCache, *args: Any) -> Any:
        if rank() != bad:
            return original(self, *args)
        if ours:
            raise autopart.CaptureError("cannot be captured", where="module a")
        raise Broken("the model is haunted")

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
    """What a step raises when one rank cannot prepare its batch, and the loss of the next one."""
    case = ALL["stack"]
    with compiled(case, fresh("stack"), case.batch(ROWS), stages=2, micro_batches=2) as pipe:
        rows = 1 if rank() == bad else 6
        try:
            pipe.step(case.batch(rows))
            raised = None
        except AutopartError as error:
            raised = error
        return raised, pipe.step(case.batch(ROWS)).item()


def refused() -> bool:
    """Whether a compile that is refused leaves no process group behind."""
    case = ALL["stack"]
    try:
        compiled(case, case.model(), case.batch(ROWS), cuts=["no.such.module"])
    except AutopartError:
        return not dist.is_initialized()
    return False


def one_step(leave_open: bool) -> float:
    """The loss of a step of a new pipe, which is closed or left open."""
    case = ALL["stack"]
    pipe = compiled(case, fresh("stack"), case.batch(ROWS), stages=2, micro_batches=2)
    loss = pipe.step(case.batch(ROWS)).item()
    if not leave_open:
        pipe.close()
    return loss


def two_at_once() -> tuple[float, float, bool]:
    """Losses before and after a pipe beside it was closed, and whether the group is gone after the last."""
    case = ALL["stack"]
    first = compiled(case, fresh("stack"), case.batch(ROWS), stages=2, micro_batches=2)
    second = compiled(case, case.model(), case.batch(ROWS), stages=1, micro_batches=2)
    before = second.step(case.batch(ROWS)).item()
    first.close()
    after = second.step(case.batch(ROWS)).item()
    second.close()
    return before, after, not dist.is_initialized()


def groups_of_a_closed_world() -> tuple[bool, float]:
    """Whether a group that a world made ends with it, and a sum over the ranks of a world that stays."""
    first = World("cpu", int(os.environ["WORLD_SIZE"]))
    second = World("cpu", first.size)
    group = second.group((0, 1), ordered=True)
    second.group(range(second.size))  # what all worlds share does not end with this one
    known = group in dist.distributed_c10d._world.pg_map
    second.close()
    ended = known and group not in dist.distributed_c10d._world.pg_map
    total = sum(row[0] for row in first.gather_numbers([float(rank())]))
    first.move(torch.ones(1), 0, 1)
    first.close()
    return ended, total


def opened_after_one_did_not_come(absent: int, patience_s: int) -> tuple[str, str]:
    """What opening the process group says when one rank stays away, and when all come after that."""
    minute = timedelta(seconds=60)
    store = PrefixStore("tests", launchers_store(60.0)[0])
    first = _open(patience_s) if rank() != absent else ""
    store.set(f"tried/{rank()}", "")
    store.wait([f"tried/{other}" for other in range(int(os.environ["WORLD_SIZE"]))], minute)
    return first, _open(60)


def _open(timeout_s: int) -> str:
    """Open the group, add up the ranks, and leave it."""
    with mock.patch.dict(os.environ, {"AUTOPART_TIMEOUT_S": str(timeout_s)}):
        try:
            world = World("cpu", int(os.environ["WORLD_SIZE"]))
        except AutopartError as error:
            return str(error)
    total = sum(row[0] for row in world.gather_numbers([float(rank())]))
    world.close()
    return f"sum {total:g}"


def texts() -> bool:
    """Whether texts and contents of any size come through whole."""
    world = World("cpu", int(os.environ["WORLD_SIZE"]))
    mine = ["", "é" * rank(), "x" * (rank() * 2**20)]
    expected = [["" for _ in range(world.size)]]
    expected += [[letter * (r * factor) for r in range(world.size)] for letter, factor in (("é", 1), ("x", 2**20))]
    good = [world.gather_text(text) for text in mine] == expected
    content = {"long": "ü" * 2**20, "none": None, "number": 1.5}
    good &= world.broadcast_object(content if rank() == 1 else None, 1) == content
    world.close()
    return good


def broadcast_weights() -> Any:
    """Tensors whose sums are equal and whose bytes differ, on one rank; and some that are equal, not a number too."""
    world = World("cpu", int(os.environ["WORLD_SIZE"]))
    permuted = torch.tensor([2.0, 1.0, 3.0] if rank() == 1 else [1.0, 2.0, 3.0])
    same = {"nan": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0), "number": torch.tensor(3)}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        broadcast_weights_if_different(world, {**same, "permuted": permuted})
    world.close()
    return permuted.tolist(), [str(warning.message) for warning in seen]

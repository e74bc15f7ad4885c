"""What the scripts of two ranks do differently by mistake: an error of ours, or a warning, says what to do.

An entry is what each rank runs, with a pipe that is open after a step (None: it makes its own), and a word of what the
error or the warning advises.  `right` does on every rank what the entries do on one.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopart
from autopart.ir.errors import AutopartError, UsageWarning
from support.jobs.misleading_jobs import Dropped
from support.models.misleading_models import ROWS, Annealed, Net, Normed

Run = Callable[[Any], Any]
FIRST = "the calls of rank 0 alone"
_SAME = "the same calls in the same order"


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"])


def opened(model: nn.Module | None = None, **options: Any) -> autopart.Pipe:
    """Return a pipe of two stages, unless the options say otherwise."""
    usual = {"sample": ROWS, "micro_batches": 4, "stages": 2, "costs": "analytic", "timeout": 20.0}
    return autopart.compile(model or Net(), "cpu:2", **{**usual, **options})


class Setting:
    """An open pipe with its optimizer, after a step, and a folder for its checkpoints."""

    def __init__(self, pipe: autopart.Pipe, folder: str) -> None:
        self.pipe, self.folder = pipe, folder
        self.optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.train()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.pipe.step(ROWS)
            self.optimizer.step()


def alone(call: Run) -> Run:
    """Return what calls this on rank 0 alone, before a step of all ranks."""

    def run(m: Setting) -> None:
        if m.pipe.rank == 0:
            call(m)
        m.pipe.step(ROWS)

    return run


def own(**options: tuple[Any, Any]) -> Run:
    """Return what compiles with other options on each rank."""
    return lambda _: opened(**{name: each[rank()] for name, each in options.items()}).close()


def _more_ranks(_: Any) -> None:
    autopart.compile(Net(), "cpu:4", sample=ROWS, costs="analytic").close()


def variables(**new: Any) -> Run:
    """Return what compiles with other environment variables, None for one that is not set."""

    def run(_: Any) -> None:
        before = dict(os.environ)
        for name, value in new.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        try:
            opened(timeout=3.0).close()
        finally:
            os.environ.clear()
            os.environ.update(before)

    return run


def _different_model(_: Any) -> None:
    model = Net()
    if rank():
        model.l.append(nn.Linear(8, 8))
    opened(model).close()


def _frozen_before(_: Any) -> None:
    model = Net()
    model.l[0].requires_grad_(bool(rank()))
    opened(model).close()


def _other_values(_: Any) -> None:
    model = Net()
    torch.manual_seed(rank())
    nn.init.normal_(model.l[0].weight)
    opened(model).close()


def _attribute(_: Any) -> None:
    model = Annealed()
    with opened(model) as pipe:
        model.beta = 0.3 + rank()
        pipe.step(ROWS)


def _evaluating(_: Any) -> None:
    with opened(Normed(), micro_batches=1) as pipe:
        if pipe.rank == 0:
            pipe.eval()
        pipe.step(ROWS)


def _replicas(batch: Callable[[], Any], **options: Any) -> Run:
    def run(_: Any) -> None:
        with opened(stages=1, replicas=2, micro_batches=2) as pipe:
            pipe.step(batch(), **{name: each[rank()] for name, each in options.items()})

    return run


def _other_batches(_: Any) -> None:
    with opened() as pipe:
        pipe.step(ROWS + pipe.rank)


def _steps(_: Any) -> None:
    with opened(Dropped()) as pipe:
        pipe.steps = 5 * pipe.rank
        pipe.step(ROWS)


def _two_pipes(_: Any) -> None:
    model = Net()
    with opened(model) as one, opened(model) as other:
        other.step(ROWS)
        one.step(ROWS)


def _optimizer_alone(m: Setting) -> None:
    for _ in range(2):
        m.pipe.step(ROWS)
        if m.pipe.rank == 0:
            m.optimizer.step()


def _zero_alone(m: Setting) -> None:
    if m.pipe.rank == 0:
        m.optimizer.zero_grad()
    m.pipe.step(ROWS)


def _scheduler_alone(m: Setting) -> None:
    if m.pipe.rank == 0:
        m.scheduler.step()
    m.train(2)


def _loaded_alone(m: Setting) -> None:
    if m.pipe.rank == 0:
        m.pipe.model.load_state_dict(Net().state_dict())
    m.pipe.step(ROWS)


def _foreign_optimizer(m: Setting) -> None:
    torch.optim.SGD(Net().parameters(), lr=0.1).step()


def _plain_state(m: Setting) -> None:
    model = Net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    m.optimizer.load_state_dict(plain.state_dict())


def _called(m: Setting) -> None:
    m.pipe.model(ROWS)


def _replaced(m: Setting) -> None:
    m.pipe.model.l[3] = nn.Linear(8, 4)
    m.pipe.step(ROWS)


def _destroyed(m: Setting) -> None:
    dist.destroy_process_group()
    m.pipe.step(ROWS)


def _compiled_alone(_: Any) -> None:
    if rank() == 0:
        opened(timeout=3.0).close()
    else:
        time.sleep(4)


def _compiled_alone_beside(_: Any) -> None:
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    try:
        _compiled_alone(None)
    finally:
        if own:
            dist.destroy_process_group()


def _ended_alone(m: Setting) -> None:
    if m.pipe.rank:
        m.pipe.step(ROWS)


def _raised_alone(m: Setting) -> None:
    if m.pipe.rank:
        raise StopIteration
    m.pipe.step(ROWS)


def _loaded_optimizer_alone(m: Setting) -> None:
    m.pipe.save(m.folder, m.optimizer)
    m.pipe.load(m.folder, m.optimizer if m.pipe.rank == 0 else None)


MISTAKES: Mapping[str, tuple[Run, str, bool]] = {
    # calls of one rank
    "rank 0 saves": (alone(lambda m: m.pipe.save(m.folder, m.optimizer)), _SAME, True),
    "rank 0 asks for the state": (alone(lambda m: m.pipe.state_dict()), _SAME, True),
    "rank 0 evaluates": (alone(lambda m: m.pipe.eval_loss(ROWS)), _SAME, True),
    "rank 0 predicts": (alone(lambda m: m.pipe.predict(ROWS)), _SAME, True),
    "rank 0 clips": (alone(lambda m: m.pipe.clip_grad_norm_(1.0)), _SAME, True),
    "rank 0 takes one step more": (alone(lambda m: m.pipe.step(ROWS)), _SAME, True),
    "rank 0 measures": (alone(lambda m: m.pipe.metrics()), _SAME, True),
    "rank 0 closes": (alone(lambda m: m.pipe.close()), _SAME, True),
    "rank 0 plans anew": (alone(lambda m: m.pipe.replan(m.optimizer)), _SAME, True),
    "rank 1 has one batch more": (_ended_alone, _SAME, True),
    "rank 1 leaves the loop": (_raised_alone, "see the error of rank 1", True),
    "rank 0 alone compiles": (_compiled_alone, "every rank calls compile", False),
    "rank 0 alone compiles beside a group of the script": (
        _compiled_alone_beside, "every rank calls compile", False
    ),
    "rank 0 alone updates": (_optimizer_alone, "on every rank", True),
    "rank 0 alone zeroes gradients": (_zero_alone, "on every rank", True),
    "rank 0 alone steps the scheduler": (_scheduler_alone, "step the scheduler, on every rank", True),
    "rank 0 alone loads into the model": (_loaded_alone, "on every rank", True),
    "rank 0 alone loads its optimizer": (_loaded_optimizer_alone, "the same optimizers", True),
    "rank 0 alone saves its optimizer": (
        lambda m: m.pipe.save(m.folder, m.optimizer if m.pipe.rank == 0 else None), "the same optimizers", True
    ),
    "rank 0 alone waits for the save": (
        lambda m: m.pipe.save(m.folder, m.optimizer, wait=m.pipe.rank == 0), "the same on every rank", True
    ),
    "rank 0 alone freezes": (
        alone(lambda m: m.pipe.model.l[0].requires_grad_(False)), "every change of the model on all ranks", True
    ),
    "rank 0 alone evaluates from now on": (_evaluating, "every change of the model on all ranks", False),
    # what each rank has of its own
    "another model on each rank": (_different_model, "build the same model", False),
    "other values on each rank": (_other_values, "seed the construction of the model alike", False),
    "other frozen layers on each rank": (_frozen_before, "build the same model", False),
    "another attribute on each rank": (_attribute, "every change of the model on all ranks", False),
    "another sample on each rank": (own(sample=(ROWS, ROWS.double())), "the same sample", False),
    "other stages on each rank": (own(stages=(2, 1)), "the same options", False),
    "other micro-batches on each rank": (own(micro_batches=(4, 2)), "the same options", False),
    "another seed on each rank": (own(seed=(0, 1)), "the same options", False),
    "another precision on each rank": (own(precision=("fp32", "bf16")), "the same options", False),
    "another schedule on each rank": (own(schedule=("1f1b", "gpipe")), "the same options", False),
    "other losses on each rank": (own(loss_reduction=("mean", "sum")), "the same options", False),
    "another way with NaN on each rank": (own(non_finite=("raise", "skip")), "the same options", False),
    "another number of rows on each rank": (lambda m: m.pipe.step(ROWS[: 8 + 4 * rank()]), "the same batch", True),
    "other batches on each rank": (_other_batches, "the same batches", False),
    "other batches on replicas": (_replicas(lambda: ROWS + rank()), "no DistributedSampler", False),
    "halves of a batch on replicas": (_replicas(lambda: ROWS.chunk(2)[rank()]), "sharded=True", False),
    "shards of other sizes": (
        _replicas(lambda: ROWS[: 6 + 4 * rank()], sharded=(True, True)), "pipe.data_rows", False
    ),
    "shards on one rank": (
        _replicas(lambda: ROWS if rank() else ROWS[:8], sharded=(True, False)), "the same on every rank", False
    ),
    "no batch on a replica": (_replicas(lambda: None if rank() else ROWS), "pipe.needs_data", False),
    "no batch on the first rank": (lambda m: m.pipe.step(ROWS if rank() else None), "pipe.needs_data", True),
    "another scale on each rank": (lambda m: m.pipe.step(ROWS, scale=1 / (1 + rank())), "the same scale=", True),
    "another norm on each rank": (lambda m: m.pipe.clip_grad_norm_(1.0 + rank()), "the same number", True),
    "another number of steps on each rank": (_steps, "set pipe.steps", False),
    # torch beside a pipe of several ranks
    "an optimizer of a copy": (_foreign_optimizer, "pipe.parameters(), after compile", True),
    "the optimizer state of a plain run": (_plain_state, "autopart.save_from", True),
    "calling the model": (_called, "pipe.predict(inputs)", True),
    "copying the model": (lambda m: copy.deepcopy(m.pipe.model), "pipe.sync_model()", True),
    "torch's averages of the model": (
        lambda m: torch.optim.swa_utils.AveragedModel(Net()).update_parameters(m.pipe.model),
        "autopart.AveragedModel(pipe)", True,
    ),
    "the state of the model": (lambda m: m.pipe.model.state_dict(), "pipe.state_dict()", True),
    "another layer in the model": (_replaced, "compile the model again", True),
    "the group destroyed": (_destroyed, "pipe.close() leaves the group", True),
    "two pipes of one model": (_two_pipes, "before the model is compiled again", False),
    # launching
    "a cluster of more ranks": (_more_ranks, "--nproc-per-node 4", False),
    "launching inside of a launch": (lambda _: autopart.launch(print, "cpu:4"), "--nproc-per-node 4", False),
    "WORLD_SIZE of another launch": (variables(WORLD_SIZE="4"), "--nproc-per-node 2", False),
    "no WORLD_SIZE": (variables(WORLD_SIZE=None), "sets both", False),
    "WORLD_SIZE in words": (variables(WORLD_SIZE="two"), "--nproc-per-node 2", False),
    "a RANK behind the last": (variables(RANK="5"), "--nproc-per-node 2", False),
    "a RANK in words": (variables(RANK="zero"), "--nproc-per-node 2", False),
    "no MASTER_ADDR": (variables(MASTER_ADDR=None), "torchrun or autopart.launch", False),
    "no MASTER_PORT": (variables(MASTER_PORT=None), "torchrun or autopart.launch", False),
    "a MASTER_PORT in words": (variables(MASTER_PORT="http"), "torchrun or autopart.launch", False),
    "one RANK twice": (variables(RANK="0"), "every rank calls compile", False),
}  # fmt: skip
"""By name: what runs, a word of the advice, and whether it needs an open pipe."""


def advised(name: str, folder: str) -> tuple[str, str]:
    """Run a mistake on this rank; return the type of its error, "" without one, and all that was advised."""
    run, _, needs = MISTAKES[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kind, fix = "", ""
        try:
            if needs:
                with opened() as pipe:
                    run(Setting(pipe, folder))
            else:
                run(None)
        except AutopartError as error:
            kind, fix = type(error).__name__, error.fix
        except Exception as error:
            kind = type(error).__name__
    return kind, "\n".join([fix, *_ours(seen)])


def _ours(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in seen if issubclass(each.category, UsageWarning)]


def right(folder: str) -> list[str]:
    """Do on every rank what most entries do on one, and return the warnings."""
    with warnings.catch_warnings(record=True) as seen, opened() as pipe:
        warnings.simplefilter("always")
        m = Setting(pipe, folder)
        for _ in range(2):
            m.train()
            m.scheduler.step()
            pipe.clip_grad_norm_(1.0)
        by_layer = [{"params": [p], "lr": 0.01 * len(name)} for name, p in pipe.named_parameters()]
        by_rank = torch.optim.SGD([*by_layer, {"params": [], "lr": 0.1 * (2 + pipe.rank)}])
        for _ in range(2):  # rates of layers, which other ranks do not have
            pipe.step(ROWS)
            by_rank.step()
            by_rank.zero_grad()
        pipe.save(folder, m.optimizer, m.scheduler)
        pipe.load(folder, m.optimizer, m.scheduler)
        pipe.eval_loss(ROWS)
        pipe.predict(ROWS)
        pipe.metrics()
        pipe.replan(m.optimizer)
        pipe.model.load_state_dict(Net().state_dict())
        m.train()
        pipe.state_dict()
        pipe.sync_model()
        pipe.model(ROWS)
        copy.deepcopy(pipe.model)
        pipe.model.l[0].requires_grad_(False)
        pipe.step(ROWS if pipe.needs_data else None)
    return _ours(seen)

"""Random runs over a dataset that are killed and go on from their checkpoints, beside one torch run that never ends.

In each life of a run everything is made again: model, pipe, optimizers, schedulers and loader. It loads what the life
before has saved, trains, saves, and trains some steps that are lost. Torch takes the batches from the order of samples,
each once an epoch, and goes back to its own state where steps are lost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import autopart
from autopart.extras.sampler.sampler import Order
from autopart.ir.errors import RefusedError
from support.jobs.scripts.script_events import Event, change, of_python
from support.jobs.scripts.script_players import OPTIMIZERS, SAMPLES, UNKEPT, nudged
from support.jobs.step_jobs import cluster
from support.models import script_models as models
from support.models.script_models import PARTS, Scripted, batch

Found = dict[tuple[int, int, str], Any]
"""Observed values by life, step and name."""


@dataclass(frozen=True)
class Life:
    """What one process does.

    steps: to the save. lost: after it. changes: of the model, after it was loaded. readers: processes of the loader.
    streamed: whether `Pipe.train` runs the steps. turned: groups and optimizers come in another order. plan: options of
    compile on two ranks.
    """

    steps: int
    lost: int
    rows: int
    micros: int
    changes: tuple[Event, ...]
    readers: int
    streamed: bool
    turned: bool
    plan: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Run:
    """A model, a dataset of `size` rows, and lives. frozen, trained, kept: as those of `Script`."""

    parts: tuple[str, ...]
    kind: str
    loss: str
    optimizer: str
    frozen: int
    trained: bool
    kept: bool
    size: int
    shuffle: bool
    lives: tuple[Life, ...]

    def smaller(self) -> Iterator[Run]:
        """Yield runs with less in them."""
        for i, life in enumerate(self.lives):
            fewer = [replace(life, changes=()), replace(life, lost=0), replace(life, steps=1), replace(life, readers=0)]
            fewer += [replace(life, micros=1), replace(life, turned=False), replace(life, rows=4)]
            for one in ((), *((each,) for each in fewer if each != life)):
                yield replace(self, lives=(*self.lives[:i], *one, *self.lives[i + 1 :]))
        for i in range(len(self.parts)):
            yield replace(self, parts=(*self.parts[:i], *self.parts[i + 1 :]))
        for plainer in ({"kept": False}, {"frozen": 0}, {"trained": False}, {"shuffle": False}, {"optimizer": "sgd"}):
            if any(getattr(self, name) != value for name, value in plainer.items()):
                yield replace(self, **plainer)  # type: ignore[arg-type]


def drawn_run(seed: int, *, alone: bool = True) -> Run:
    """Return the random run of a seed. alone: for one rank."""
    random = Random(seed)
    possible = [part for part in PARTS if not part.startswith("norm")]
    parts = tuple(random.choice(possible) for _ in range(random.randint(1, 3)))
    kind, loss = random.choice(["rows", "tokens"]), random.choice(["class", "square", "token"])
    frozen, single, model = random.choice([0, 0, 1, len(parts)]), "counting" in parts, Scripted(parts, kind, loss)
    lives = []
    for _ in range(random.randint(2, 3)):
        changes = [of_python(random, model) for _ in range(random.choice([0, 0, 1, 2]))]
        if random.random() < 0.25:
            changes.append(("freeze", random.choice([0, 1, len(parts)])))
        for event in changes:
            change(model, event)
        streamed = alone and random.random() < 0.25
        doubled = not alone and not single and random.random() < 0.5
        plan = {"stages": 1, "replicas": 2} if doubled else {"stages": 1 if alone else 2}
        lives.append(Life(
            random.randint(1, 6), random.choice([0, 1, 3]), random.choice([3, 4, 4, 5]),
            1 if single or doubled else random.choice([1, 2, 3]), tuple(changes), int(alone and random.random() < 0.1),
            streamed, random.random() < 0.3, tuple(plan.items()),
        ))  # fmt: skip
    return Run(
        parts, kind, loss, random.choice([*OPTIMIZERS]), frozen, random.random() < 0.5,
        frozen > 0 and random.random() < 0.5, random.randint(9, 14), random.random() < 0.7, tuple(lives),
    )  # fmt: skip


class Rows(Dataset[dict[str, Any]]):
    """The rows of a batch. numbered: with the number of each."""

    def __init__(self, run: Run, numbered: bool) -> None:
        self.whole = batch(run.kind, run.size, 4, 1)
        if numbered:
            self.whole["number"] = torch.arange(run.size)

    def __len__(self) -> int:
        return len(self.whole["x"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.whole.items()}


def made(run: Run) -> tuple[Scripted, set[str]]:
    """Return a new model, and the names of the parameters that the optimizers leave out."""
    model = Scripted(run.parts, run.kind, run.loss)
    model.freeze(run.frozen)
    return model, {name for name, p in model.named_parameters() if run.trained and not p.requires_grad}


def driving(run: Run, named: Any, left_out: set[str], turned: bool = False) -> tuple[list[Any], list[Any]]:
    """Return optimizers and schedulers."""
    turn = -1 if turned else 1
    optimizers = OPTIMIZERS[run.optimizer]([p for name, p in named if name not in left_out], turn)[::turn]
    return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]


def updated(*objects: Any) -> None:
    for each in objects:
        each.step()
    for each in objects:
        if isinstance(each, torch.optim.Optimizer):
            each.zero_grad()


# -- a pipe ----------------------------------------------------------------------------------------------------------


class Living:
    """One life in a pipe."""

    def __init__(self, run: Run, number: int, folder: Path) -> None:
        self.run, self.number, self.life = run, number, run.lives[number]
        model, left_out = made(run)
        for event in (event for life in run.lives[:number] for event in life.changes):
            change(model, event)
        sample = batch(run.kind, self.life.rows, 4, 1)
        self.pipe = autopart.compile(
            model, cluster(), sample=sample, micro_batches=self.life.micros, costs="analytic", cache=False,
            schedule="pipedream" if self.life.streamed else "auto", **dict(self.life.plan),
        )  # fmt: skip
        self.optimizers, self.schedulers = driving(run, self.pipe.named_parameters(), left_out, self.life.turned)
        self.pipe.load(folder, self.optimizers, self.schedulers, missing_ok=True)
        for event in self.life.changes:
            change(model, event)
        self.keeps = run.kept and not self.life.streamed
        if self.keeps:
            try:
                self.pipe.replan(self.optimizers, cache=autopart.freeze.AutoCache(1 << 20, samples=SAMPLES))
            except RefusedError as error:
                if UNKEPT not in str(error):
                    raise
                self.keeps = False
        self.rows = Rows(run, self.keeps)
        self.sampler = self.pipe.sampler(self.rows, rows=self.life.rows, seed=3, shuffle=run.shuffle)
        self.began = self.pipe.steps

    def train(self, steps: int, found: Found) -> None:
        """Train at least so many steps: batches in flight come too."""
        end = self.pipe.steps + steps
        while self.pipe.steps < end:
            loader = DataLoader(self.rows, batch_sampler=self.sampler, num_workers=self.life.readers)
            losses = self._streamed(loader) if self.life.streamed else self._stepped(loader)
            for step, loss in enumerate(losses, self.pipe.steps - self.began):
                found[self.number, step, "loss"] = loss.item()
                if self.began + step + 1 == end:
                    break
            self.pipe.flush()

    def _stepped(self, loader: Any) -> Iterator[torch.Tensor]:
        for given in loader:
            names = {"samples": given.pop("number").tolist()} if self.keeps else {}
            loss = self.pipe.step(given, **names)
            updated(*self.optimizers, *self.schedulers)
            yield loss

    def _streamed(self, loader: Any) -> Iterator[torch.Tensor]:
        found: Iterator[torch.Tensor] = self.pipe.train(
            loader, optimizer=lambda parameters: self.optimizers, scheduler=lambda optimizers: self.schedulers
        )
        return found


def lived(run: Run, folder: Path) -> tuple[Found, list[tuple[int, int]]]:
    """Run every life in a pipe. Returns what was observed, and how many steps each life has saved and lost."""
    found, counts = Found(), []
    for number, life in enumerate(run.lives):
        models.reset()
        living = Living(run, number, folder)
        living.train(life.steps, found)
        living.pipe.save(folder, living.optimizers, living.schedulers)
        saved = living.pipe.steps - living.began
        found[number, saved, "state"] = copy.deepcopy({**living.pipe.state_dict()})
        living.train(life.lost, found)
        counts.append((saved, living.pipe.steps - living.began - saved))
        living.pipe.close(sync=False)
    return found, counts


# -- torch -----------------------------------------------------------------------------------------------------------


class Unbroken:
    """The same run in plain torch. nudge: seed of changes to the last bits of its weights."""

    def __init__(self, run: Run, nudge: int = 0) -> None:
        models.reset()
        self.run, self.epoch, self.consumed = run, 0, 0
        self.model, left_out = made(run)
        if nudge:
            nudged(self.model, nudge)
        self.driving = driving(run, self.model.named_parameters(), left_out)
        self.order, self.whole = Order(run.size, 3, run.shuffle), Rows(run, False).whole

    def step(self, rows: int) -> float:
        places = self.order.of(self.epoch)[self.consumed : self.consumed + rows]
        self.consumed += len(places)
        if self.consumed == self.run.size:
            self.epoch, self.consumed = self.epoch + 1, 0
        loss = self.model(**{name: values[places] for name, values in self.whole.items()})["loss"]
        loss.backward()
        updated(*self.driving[0], *self.driving[1])
        return float(loss.item())

    def play(self, counts: list[tuple[int, int]]) -> Found:
        found = Found()
        for number, (saved, lost) in enumerate(counts):
            life = self.run.lives[number]
            for event in life.changes:
                change(self.model, event)
            for step in range(saved):
                found[number, step, "loss"] = self.step(life.rows)
            found[number, saved, "state"] = copy.deepcopy({**self.model.state_dict()})
            kept = copy.deepcopy((self.model, self.driving, self.epoch, self.consumed))
            for step in range(saved, saved + lost):
                found[number, step, "loss"] = self.step(life.rows)
            self.model, self.driving, self.epoch, self.consumed = kept
        return found

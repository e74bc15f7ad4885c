"""The two players of a training script: plain torch, and a pipe.

The torch side runs whole batches. For a model whose rows are coupled through buffers or batch statistics it runs the
same micro-batches in order.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import autopart
from autopart.batch.batch import split_rows
from autopart.ir.errors import RefusedError
from support.jobs.scripts.script_events import CALLS, Event, change, scaled
from support.jobs.step_jobs import cluster
from support.models.script_models import COUPLED, Scripted, batch, shares
from support.oracles.one_process import counters_of

SAMPLES = 4096
"""Samples of a pass, at most, for a cache."""
UNKEPT = "cannot be kept by sample"
WITHOUT_STREAM = ("gradients", "clip")
"""Calls without a meaning where `Pipe.train` steps the optimizers."""
Seen = tuple[int, str, Any]
"""An observed value: event number, name, value."""


def _sgd(parameters: list[Any], **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": parameters}], lr=0.1, **more)


def _parted(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    return [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]


def _grouped(parameters: list[Any], turn: int) -> torch.optim.Optimizer:
    groups = zip(_parted(parameters), (0.1, 0.0), strict=True)
    return torch.optim.AdamW([{"params": own, "weight_decay": decay} for own, decay in groups][::turn], lr=0.01)


def _two(parameters: list[Any], turn: int) -> list[torch.optim.Optimizer]:
    matrices, rest = _parted(parameters)
    return [_sgd(matrices, momentum=0.9), torch.optim.Adam([{"params": rest}], lr=0.01)]


OPTIMIZERS: dict[str, Callable[[list[Any], int], list[torch.optim.Optimizer]]] = {
    "sgd": lambda own, turn: [torch.optim.SGD(own or [{"params": []}], lr=0.1, weight_decay=0.01)],
    "momentum": lambda own, turn: [torch.optim.SGD(own or [{"params": []}], lr=0.1, momentum=0.9)],
    "adam": lambda own, turn: [torch.optim.Adam(own or [{"params": []}], lr=0.01)],
    "groups": lambda own, turn: [_grouped(own, turn)],
    "two": _two,
}
"""Optimizers of parameters. The second argument is -1 for groups in the other order."""


@dataclass(frozen=True)
class Script:
    """A model, its compile options and the events of a training script.

    first: the batch it is compiled with. frozen: parts that are frozen at first. trained: whether the optimizers are
    made of what requires a gradient. kept: whether activations of frozen parts are kept. streamed: whether `Pipe.train`
    runs the steps.
    """

    parts: tuple[str, ...]
    kind: str
    loss: str
    micros: int
    optimizer: str
    first: Event
    events: tuple[Event, ...]
    frozen: int = 0
    trained: bool = False
    kept: bool = False
    streamed: bool = False

    @property
    def coupled(self) -> bool:
        """Whether the torch side must run micro-batches too."""
        return any(part in COUPLED for part in self.parts)

    def smaller(self) -> Iterator[Script]:
        """Yield scripts with one event or one part less, or with less asked."""
        for i in reversed(range(len(self.parts))):
            yield replace(self, parts=(*self.parts[:i], *self.parts[i + 1 :]))
        for i in reversed(range(len(self.events))):
            yield replace(self, events=(*self.events[:i], *self.events[i + 1 :]))
        for name in ("frozen", "trained", "kept", "streamed"):
            if getattr(self, name):
                yield replace(self, **{name: 0})  # type: ignore[arg-type]


class Player:
    """Runs the events of a script and records observed values as (event number, name, value)."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.first = script.first
        self.batch = batch(script.kind, *script.first[1:4], **script.first[4])
        self.varying, self.text, self.steps = (), "", 0
        self.saved: Any = None
        self.model = Scripted(script.parts, script.kind, script.loss)
        self.model.freeze(script.frozen)
        self.left_out = {n for n, p in self.model.named_parameters() if script.trained and not p.requires_grad}

    def optimize(self, named: Iterable[tuple[str, Any]], turned: bool = False) -> None:
        """Make the optimizers and their schedulers. turned: with groups and optimizers in another order."""
        own = [parameter for name, parameter in named if name not in self.left_out]
        self.optimizers = OPTIMIZERS[self.script.optimizer](own, -1 if turned else 1)
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]

    def given(self) -> dict[str, Any]:
        """Return the batch of the next step, with the values that change with every step."""
        self.steps += 1
        value = self.steps if not self.text else f"{self.text}{self.steps}"
        values = {"note": value, "tag": value, "scale": 0.5 + self.steps / 8}
        self.batch = self.batch | {name: values[name] for name in self.varying}
        return self.batch

    def play(self, place: int, event: Event) -> None:
        """Run one event. Raises what torch or autopart raises."""
        name = event[0]
        if name == "batch":
            self.first, self.batch = event, batch(self.script.kind, *event[1:4], **event[4])
        elif name == "vary":
            _, self.varying, self.text = event
        elif name == "lr":
            for group in (group for each in self.optimizers for group in each.param_groups):
                group["lr"] = event[1]
        elif name == "schedule":
            for scheduler in self.schedulers:
                scheduler.step()
        elif name not in CALLS:
            self.change(event)
        elif name in ("step", "accumulate"):
            count = 2 if name == "accumulate" else 1
            losses = self.streamed(count) if self.script.streamed else self.stepped(count, event[-1] is not False)
            self.seen += [(place, "loss", loss) for loss in losses]
        elif name not in WITHOUT_STREAM or not self.script.streamed:
            self.seen.append((place, name, getattr(self, name.replace(" ", "_"))(*event[1:])))

    def stepped(self, count: int, none: bool = True) -> list[Any]:
        """Accumulate the gradients of some batches and step the optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=none)
        losses = [self.step() for _ in range(count)]
        for optimizer in self.optimizers:
            optimizer.step()
        return losses

    def streamed(self, count: int) -> list[Any]:
        """Train on some batches one after the other."""
        return [loss for _ in range(count) for loss in self.stepped(1)]

    def change(self, event: Event) -> None:
        change(self.model, event)

    def step(self) -> Any:
        raise NotImplementedError


class Plain(Player):
    """Runs a script in plain torch."""

    def __init__(self, script: Script, nudge: int = 0) -> None:
        """nudge: seed of changes to the last bit of the weights; 0: no changes."""
        super().__init__(script)
        if nudge:
            nudged(self.model, nudge)
        self.optimize(self.model.named_parameters())
        self.planned = max(split_rows(len(self.batch["x"]), script.micros))

    def pieces(self) -> list[dict[str, Any]]:
        rows = len(self.batch["x"])
        if not self.script.coupled:
            return [self.batch]
        micros = self.script.micros if rows >= self.script.micros else -(-rows // self.planned)
        ends = [0, *itertools.accumulate(split_rows(rows, micros))]
        return [
            {n: t[a:b] if n in ("x", "y") else t for n, t in self.batch.items()} for a, b in itertools.pairwise(ends)
        ]

    def step(self) -> Any:
        self.given()
        pieces, total, again = self.pieces(), 0.0, counters_of(self.model)
        for piece, share in zip(pieces, shares(self.model, pieces), strict=True):
            again()
            loss = self.model(**piece)["loss"] * (share if len(pieces) > 1 else 1.0)
            if share == 0.0:  # no target counts: its mean would be NaN, and the batch's loss leaves it out
                continue
            loss.backward()
            total += loss.item()
        return total

    def _evaluated(self) -> dict[str, torch.Tensor]:
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            found: dict[str, torch.Tensor] = self.model(**self.batch)
        for module, flag in flags:
            module.training = flag
        return found

    def eval_loss(self) -> Any:
        return self._evaluated()["loss"]

    def predict(self) -> Any:
        return self._evaluated()

    def gradients(self) -> Any:
        return {
            n: p.grad if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters() if p.requires_grad
        }

    def state(self, factor: float) -> Any:
        state = self.sync()
        self.model.load_state_dict(scaled(copy.deepcopy(state), factor))
        return state

    def clip(self, norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def sync(self) -> Any:
        return copy.deepcopy({**self.model.state_dict()})

    into = sync

    def save(self, wait: bool) -> None:
        self.saved = copy.deepcopy([each.state_dict() for each in (self.model, *self.optimizers, *self.schedulers)])

    def load_back(self, turned: bool) -> None:
        if self.saved is None:
            return
        for each, state in zip((self.model, *self.optimizers, *self.schedulers), self.saved, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        for parameter in self.model.parameters():
            parameter.grad = None


class Piped(Player):
    """Runs a script in a pipe with one stage per rank."""

    def __init__(self, script: Script, folder: Path) -> None:
        """folder: for checkpoints."""
        super().__init__(script)
        self.folder = folder
        self.samples: dict[Any, int] = {}
        self.pipe = autopart.compile(
            self.model, cluster(), sample=self.batch, micro_batches=script.micros, costs="analytic", cache=False,
            stages=int(cluster().removeprefix("cpu:")), schedule="pipedream" if script.streamed else "auto",
        )  # fmt: skip
        self.optimize(self.pipe.named_parameters())
        self.keep()

    def keep(self) -> None:
        """Plan anew, with activations of frozen parts kept, if the script asks for it and the parts can be kept."""
        self.keeping = self.script.kept
        try:
            if self.keeping:
                self.pipe.replan(self.optimizers, cache=autopart.freeze.AutoCache(1 << 20, samples=SAMPLES))
        except RefusedError as error:
            if UNKEPT not in str(error):
                raise
            self.keeping = False

    def names(self) -> dict[str, Any]:
        """Return the names of the samples of the batch, where activations are kept."""
        rows, length, seed, more = self.first[1:]
        first = self.samples.setdefault((rows, length, seed, "narrow" in more, "mask" in more), len(self.samples) * 8)
        return {"samples": range(first, first + rows)} if self.keeping else {}

    def step(self) -> Any:
        given = self.given()
        try:
            return self.pipe.step(given, **self.names()).item()
        except RefusedError as error:
            if UNKEPT not in str(error):
                raise
        self.keep()  # as the error says
        return self.pipe.step(given).item()

    def streamed(self, count: int) -> list[Any]:
        batches = [self.given() for _ in range(count)]
        return [loss.item() for loss in self.pipe.train(batches, optimizer=lambda parameters: self.optimizers)]

    def change(self, event: Event) -> None:
        super().change(event)
        if event[0] == "freeze":
            self.keep()

    def eval_loss(self) -> Any:
        return self.pipe.eval_loss(self.batch)

    def predict(self) -> Any:
        return self.pipe.predict(self.batch)

    def gradients(self) -> Any:
        return self.pipe.gradients()

    def state(self, factor: float) -> Any:
        state = copy.deepcopy({**self.pipe.state_dict()})
        self.pipe.load_state_dict(scaled(copy.deepcopy(state), factor))
        return state

    def clip(self, norm: float) -> Any:
        return self.pipe.clip_grad_norm_(norm)

    def sync(self) -> Any:
        self.pipe.sync_model()
        return copy.deepcopy({**self.model.state_dict()})

    def save(self, wait: bool) -> None:
        self.saved = True
        self.pipe.save(self.folder / "saved", self.optimizers, self.schedulers, wait=wait)

    def load_back(self, turned: bool) -> None:
        if not self.saved:
            return
        if turned:
            self.optimize(self.pipe.named_parameters(), True)
        turn = -1 if turned else 1
        self.pipe.load(self.folder / "saved", self.optimizers[::turn], self.schedulers[::turn])

    def into(self) -> Any:
        self.pipe.save(self.folder / "into")
        model = Scripted(self.script.parts, self.script.kind, self.script.loss)
        autopart.load_into(model, self.folder / "into")
        return {**model.state_dict()}


def nudged(model: torch.nn.Module, seed: int) -> None:
    """Change the last bit of about half of the weights of a model."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=random) < 0.5
            parameter.copy_(
                torch.where(up, torch.nextafter(parameter, torch.full_like(parameter, torch.inf)), parameter)
            )

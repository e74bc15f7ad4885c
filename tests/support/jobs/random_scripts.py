"""Random training scripts, which run in plain torch and in a pipe and are compared and reduced.

The torch side runs whole batches. For a model whose rows are coupled through buffers or batch statistics it runs the
same micro-batches in order.

Some random trainings amplify rounding: a loss that diverges, or a gradient that is zero but for rounding and that Adam
scales up. Torch itself computes other values there after a change of the last bit of a weight. So torch also runs with
such weights, and a pipe that differs must stay within SPREADS times the differences of torch from itself.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import autopart
from autopart.capture.batch.batch import split_rows
from support.jobs.script_events import Event, change, draw, words
from support.jobs.step_jobs import cluster
from support.models import script_models as models
from support.models.script_models import COUPLED, PARTS, Scripted, batch, shares
from support.oracles.one_process import counters_of

TOLERANCE = 1e-9
NUDGES, SPREADS = 3, 10.0
Seen = tuple[int, str, Any]
"""An observed value: event number, name, value."""
CALLS = ("step", "accumulate", "eval_loss", "predict", "gradients", "state", "clip", "sync")


@dataclass(frozen=True)
class Script:
    """A model, its compile options and the events of a training script. first: the batch it is compiled with."""

    parts: tuple[str, ...]
    kind: str
    loss: str
    micros: int
    optimizer: str
    first: Event
    events: tuple[Event, ...]

    @property
    def coupled(self) -> bool:
        """Whether the torch side must run micro-batches too."""
        return any(part in COUPLED for part in self.parts)


@dataclass(frozen=True)
class Outcome:
    """The result of a script.

    kind: "equal", "unstable" (different, by no more than torch after a change of the last bits of its weights),
    "refused" or "wrong"; text: the reason; calls: number of exact calls of the pipe.
    """

    kind: str
    text: str
    calls: int


def drawn(seed: int, events: int = 12) -> Script:
    """Return the random script of a seed."""
    random = Random(seed)
    parts = tuple(random.choice(PARTS) for _ in range(random.randint(1, 3)))
    kind = random.choice(["rows", "tokens"])
    loss = random.choice(["class", "square", "token"])
    coupled = any(part in COUPLED for part in parts)
    micros = (
        1
        if {"norm alone", "counting"} & {*parts} and random.random() < 0.8
        else random.choice([1, 2, 2] if coupled else [1, 2, 3])
    )
    optimizer = random.choice(["sgd", "momentum", "adam"])
    script = Script(parts, kind, loss, micros, optimizer, ("batch", 8, 4, 0, {}), ())
    model = Scripted(parts, kind, loss)
    chosen: list[Event] = []
    try:
        for _ in range(events):
            chosen.append(draw(random, model))
            if chosen[-1][0] not in CALLS and chosen[-1][0] not in ("batch", "lr"):
                change(model, chosen[-1])
    finally:
        models.reset()
    return replace(script, events=(*chosen, ("step", True), ("gradients",)))


class Player:
    """Runs the events of a script and records observed values as (event number, name, value)."""

    model: Scripted
    optimizer: torch.optim.Optimizer

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.batch = batch(script.kind, *script.first[1:4], **script.first[4])

    def optimize(self, parameters: Any) -> None:
        make: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        }
        self.optimizer = make[self.script.optimizer](parameters)

    def play(self, place: int, event: Event) -> None:
        """Run one event. Raises what torch or autopart raises."""
        name = event[0]
        if name == "batch":
            self.batch = batch(self.script.kind, *event[1:4], **event[4])
        elif name == "lr":
            self.optimizer.param_groups[0]["lr"] = event[1]
        elif name not in CALLS:
            change(self.model, event)
        elif name in ("step", "accumulate"):
            self.optimizer.zero_grad(set_to_none=event[-1] is not False)
            for _ in range(2 if name == "accumulate" else 1):
                self.seen.append((place, "loss", self.step()))
            self.optimizer.step()
        else:
            self.seen.append((place, name, getattr(self, name)(*event[1:])))

    def step(self) -> Any:
        raise NotImplementedError


class Plain(Player):
    """Runs a script in plain torch."""

    def __init__(self, script: Script, nudge: int = 0) -> None:
        """nudge: seed of changes to the last bit of the weights; 0: no changes."""
        super().__init__(script)
        self.model = Scripted(script.parts, script.kind, script.loss)
        if nudge:
            nudged(self.model, nudge)
        self.optimize(self.model.parameters())
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
        state = {n: t.clone() for n, t in self.model.state_dict().items()}
        self.model.load_state_dict({n: t * factor if t.is_floating_point() else t for n, t in state.items()})
        return state

    def clip(self, norm: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def sync(self) -> Any:
        return {n: t.clone() for n, t in self.model.state_dict().items()}


class Piped(Player):
    """Runs a script in a pipe with one stage per rank."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.model = Scripted(script.parts, script.kind, script.loss)
        self.pipe = autopart.compile(
            self.model, cluster(), sample=self.batch, micro_batches=script.micros, costs="analytic", cache=False,
            stages=int(cluster().removeprefix("cpu:")),
        )  # fmt: skip
        self.optimize(self.pipe.parameters())

    def step(self) -> Any:
        return self.pipe.step(self.batch).item()

    def eval_loss(self) -> Any:
        return self.pipe.eval_loss(self.batch)

    def predict(self) -> Any:
        return self.pipe.predict(self.batch)

    def gradients(self) -> Any:
        return self.pipe.gradients()

    def state(self, factor: float) -> Any:
        state = self.pipe.state_dict()
        self.pipe.load_state_dict({n: t * factor if t.is_floating_point() else t for n, t in state.items()})
        return state

    def clip(self, norm: float) -> Any:
        return self.pipe.clip_grad_norm_(norm)

    def sync(self) -> Any:
        self.pipe.sync_model()
        return {n: t.clone() for n, t in self.model.state_dict().items()}


# -- comparing -------------------------------------------------------------------------------------------------------


def played(script: Script) -> Outcome:
    """Return the outcome of a script on this rank. Collective."""
    models.reset()
    try:
        plain, ended = _plain(script)
        short = replace(script, events=script.events[:ended])
        wanted = _wanted(plain.seen, [_plain(short, nudge)[0].seen for nudge in range(1, NUDGES + 1)])
        models.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _piped(short, wanted)
    finally:
        models.reset()


def nudged(model: torch.nn.Module, seed: int) -> None:
    """Change the last bit of about half of the weights of a model."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=random) < 0.5
            parameter.copy_(
                torch.where(up, torch.nextafter(parameter, torch.full_like(parameter, torch.inf)), parameter)
            )


def _plain(script: Script, nudge: int = 0) -> tuple[Plain, int]:
    """Run a script in plain torch up to the first event that torch refuses."""
    models.reset()
    player = Plain(script, nudge)
    for place, event in enumerate(script.events):
        try:
            player.play(place, event)
        except Exception:
            player.seen = [seen for seen in player.seen if seen[0] < place]
            return player, place
    player.seen.append((len(script.events), "the end", player.sync()))
    return player, len(script.events)


@dataclass(frozen=True)
class Wanted:
    """A value that a script must observe. spreads: by name, the largest differences of torch from itself."""

    place: int
    name: str
    values: dict[str, torch.Tensor]
    spreads: dict[str, torch.Tensor]


def _wanted(seen: Sequence[Seen], others: Sequence[Sequence[Seen]]) -> list[Wanted]:
    """Return what torch observed; others: what it observed with nudged weights."""
    found = []
    for i, (place, name, value) in enumerate(seen):
        values = _values(value)
        nudged_values = [_values(other[i][2]) for other in others if i < len(other)]
        spreads = {key: _spread(tensor, [other.get(key) for other in nudged_values]) for key, tensor in values.items()}
        found.append(Wanted(place, name, values, spreads))
    return found


def _values(value: Any) -> dict[str, torch.Tensor]:
    """Return an observed value as tensors in double precision by name, without missing ones."""
    values = value if isinstance(value, dict) else {"": value}
    return {name: torch.as_tensor(t).detach().double().clone() for name, t in values.items() if t is not None}


def _spread(tensor: torch.Tensor, others: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the largest finite difference between a tensor and others of its shape, as a scalar."""
    found = [(other - tensor).abs().nan_to_num(0.0, 0.0, 0.0).amax() for other in others if other is not None]
    return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float64)


def _piped(script: Script, expected: Sequence[Wanted]) -> Outcome:
    player: Piped | None = None
    place, calls = -1, 0
    unstable = ""
    recent: list[Event] = [script.first]
    try:
        player = Piped(script)
        for place, event in enumerate(script.events):
            recent.append(event)
            before = len(player.seen)
            player.play(place, event)
            for found, wanted in zip(player.seen[before:], expected[before:], strict=False):
                if difference := _different(found, wanted, SPREADS):
                    return Outcome("wrong", f"event {place} {event}: {difference}", calls)
                unstable = unstable or _different(found, wanted, 0.0)
            calls += event[0] in CALLS
            if event[0] in ("step", "accumulate"):  # these calls check the whole model for changes
                recent.clear()
        if len(expected) > len(player.seen):
            player.pipe.close()
            end = (len(script.events), "the end", player.model.state_dict())
            if difference := _different(end, expected[-1], SPREADS):
                return Outcome("wrong", difference, calls)
            unstable = unstable or _different(end, expected[-1], 0.0)
        return Outcome("unstable" if unstable else "equal", unstable, calls)
    except autopart.AutopartError as error:
        named = place < 0 or any(word in str(error) for event in recent for word in words(event))
        text = f"event {place}: {type(error).__name__}: {error}"
        return Outcome("refused" if named else "wrong", text if named else f"names nothing of {recent}: {text}", calls)
    except Exception as error:
        return Outcome("wrong", f"event {place}: raw {type(error).__name__}: {error}", calls)
    finally:
        if player is not None:
            player.pipe.close(sync=False)


def _different(found: Seen, wanted: Wanted, spreads: float) -> str:
    """Return a difference beyond the tolerance and `spreads` times the differences of torch from itself, or ""."""
    if found[:2] != (wanted.place, wanted.name):
        return f"{found[:2]} where {(wanted.place, wanted.name)} comes"
    values, zero = _values(found[2]), torch.zeros((), dtype=torch.float64)
    for name in wanted.values.keys() | values.keys():
        a, b = values.get(name, zero), wanted.values.get(name, zero)
        allowed = 1e-11 + spreads * float(wanted.spreads.get(name, zero))
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=allowed, equal_nan=True):
            return f"{found[1]} {name} is {a.flatten()[:4].tolist()} where torch has {b.flatten()[:4].tolist()}"
    return ""


def smaller(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Return a failing script from which no event and no part can be removed."""
    found = True
    while found:
        found = False
        tries = [replace(script, events=_without(script.events, i)) for i in range(len(script.events))]
        tries += [replace(script, parts=_without(script.parts, i)) for i in range(len(script.parts))]
        for other in reversed(tries):
            if fails(other):
                script, found = other, True
                break
    return script


def _without(things: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return (*copy.copy(things[:place]), *things[place + 1 :])

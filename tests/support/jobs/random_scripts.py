"""Random training scripts, which run in plain torch and in a pipe and are compared and reduced.

Some random trainings amplify rounding: a loss that diverges, or a gradient that is zero but for rounding and that Adam
scales up. Torch itself computes other values there after a change of the last bit of a weight. So torch also runs with
such weights, and a pipe that differs must stay within SPREADS times the differences of torch from itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import autopart
from autopart.extras.freezing import replan as replanning
from support.jobs.random_runs import Run, Unbroken, drawn_run, lived
from support.jobs.random_trainers import TrainerRun, difference, drawn_trainer
from support.jobs.script_events import CALLS, SETTINGS, Event, change, draw, words
from support.jobs.script_players import OPTIMIZERS, Piped, Plain, Script, Seen
from support.models import script_models as models
from support.models.script_models import COUPLED, PARTS, Scripted

TOLERANCE = 1e-9
NUDGES, SPREADS = 3, 10.0
RUNS, TRAINERS = (4, 7), 9
"""The last digits of seeds of runs that are killed, and of runs of a Trainer."""
Drawn = Script | Run | TrainerRun


@dataclass(frozen=True)
class Outcome:
    """The result of a script.

    kind: "equal", "unstable" (different, by no more than torch after a change of the last bits of its weights),
    "refused" or "wrong"; text: the reason; calls: number of exact calls of the pipe.
    """

    kind: str
    text: str
    calls: int


def drawn(seed: int, events: int = 12, *, alone: bool = True) -> Script:
    """Return the random script of a seed. alone: for one rank, where asynchronous training is plain training."""
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
    frozen = random.choice([0, 0, 1, len(parts)])
    script = Script(
        parts, kind, loss, micros, random.choice([*OPTIMIZERS]), ("batch", 8, 4, 0, {}), (), frozen,
        random.random() < 0.5, frozen > 0 and random.random() < 0.6,
    )  # fmt: skip
    script = replace(script, streamed=alone and not script.kept and random.random() < 0.2)
    model = Scripted(parts, kind, loss)
    chosen: list[Event] = []
    try:
        for _ in range(events):
            chosen.append(draw(random, model))
            if chosen[-1][0] not in (*CALLS, *SETTINGS):
                change(model, chosen[-1])
    finally:
        models.reset()
    return replace(script, events=(*chosen, ("step", True), ("gradients",)))


# -- comparing -------------------------------------------------------------------------------------------------------


def played(script: Script, folder: Path) -> Outcome:
    """Return the outcome of a script on this rank. Collective. folder: an empty one for checkpoints."""
    models.reset()
    try:
        plain, ended = _plain(script)
        short = replace(script, events=script.events[:ended])
        wanted = _wanted(plain.seen, [_plain(short, nudge)[0].seen for nudge in range(1, NUDGES + 1)])
        models.reset()
        with quiet(), planned_anew():
            return _piped(short, wanted, folder)
    finally:
        models.reset()


@contextmanager
def planned_anew() -> Iterator[None]:
    """Adopt every new plan, and keep activations wherever that is possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replanning, "_pays", lambda *_: True)
        patch.setattr(replanning, "WORTH", -1e9)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
    leaves = pytree.tree_flatten_with_path(value if isinstance(value, dict) else {"": value})[0]
    named = {"/".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}
    return {
        name: torch.as_tensor([*leaf.encode()] if isinstance(leaf, str) else leaf).detach().double().clone()
        for name, leaf in named.items()
        if leaf is not None
    }


def _spread(tensor: torch.Tensor, others: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the largest finite difference between a tensor and others of its shape, as a scalar."""
    found = [(other - tensor).abs().nan_to_num(0.0, 0.0, 0.0).amax() for other in others if other is not None]
    return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float64)


def _piped(script: Script, expected: Sequence[Wanted], folder: Path) -> Outcome:
    player: Piped | None = None
    place, calls = -1, 0
    unstable = ""
    recent: list[Event] = [script.first]
    try:
        player = Piped(script, folder)
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


def played_run(run: Run, folder: Path) -> Outcome:
    """Return the outcome of a run on this rank. Collective. folder: an empty one for checkpoints."""
    try:
        with quiet(), planned_anew():
            found, counts = lived(run, folder)
            expected = Unbroken(run).play(counts)
            others = [Unbroken(run, nudge).play(counts) for nudge in range(1, NUDGES + 1)]
    except autopart.AutopartError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}", 0)
    except Exception as error:
        return Outcome("wrong", f"raw {type(error).__name__}: {error}", 0)
    finally:
        models.reset()
    unstable = ""
    for (life, step, name), value in found.items():
        at = life * 1000 + step
        seen = [[(at, name, each[life, step, name])] for each in (expected, *others)]
        wanted = _wanted(seen[0], seen[1:])[0]
        if difference := _different((at, name, value), wanted, SPREADS):
            return Outcome("wrong", f"life {life}, step {step}: {difference}", len(found))
        unstable = unstable or _different((at, name, value), wanted, 0.0)
    return Outcome("unstable" if unstable else "equal", unstable, len(found))


def played_trainer(run: TrainerRun, folder: Path) -> Outcome:
    """Return the outcome of a run of a Trainer. folder: an empty one."""
    try:
        with quiet():
            found = difference(run, folder)
    except autopart.AutopartError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}", 0)
    except Exception as error:
        return Outcome("wrong", f"raw {type(error).__name__}: {error}", 0)
    return Outcome("wrong" if found else "equal", found, 1)


# -- any of them -----------------------------------------------------------------------------------------------------


def drawn_any(seed: int, events: int = 12, *, alone: bool = True) -> Drawn:
    """Return what is drawn from a seed: some are runs that are killed, and on one rank some runs of a Trainer."""
    if seed % 10 == TRAINERS and alone:
        return drawn_trainer(seed)
    return drawn_run(seed, alone=alone) if seed % 10 in RUNS else drawn(seed, events, alone=alone)


def played_any(what: Drawn, folder: Path) -> Outcome:
    """Return the outcome of what was drawn on this rank. Collective. folder: an empty one."""
    if isinstance(what, TrainerRun):
        return played_trainer(what, folder)
    return played(what, folder) if isinstance(what, Script) else played_run(what, folder)


def smaller(what: Drawn, fails: Callable[[Drawn], bool]) -> Drawn:
    """Return something that fails and of which nothing can be removed."""
    while other := next((each for each in what.smaller() if fails(each)), None):
        what = other
    return what

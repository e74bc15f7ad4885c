"""Random training scripts: a pipe computes what torch does, to the end or up to an error of autopart.

A script is drawn from a seed, so that a failure can be repeated and a long run resumed anywhere: `pytest -m slow
tests/e2e/test_random_scripts.py -k "1200-"`. Some seeds draw runs over a dataset that are killed and go on, and some
runs of a Trainer that are resumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from support.jobs.scripts.random_runs import Run, Unbroken, drawn_run, lived
from support.jobs.scripts.random_trainers import TrainerRun, difference, drawn_trainer
from support.jobs.scripts.script_events import CALLS, SETTINGS, Event, change, draw, words
from support.jobs.scripts.script_players import OPTIMIZERS, Piped, Plain, Script, Seen
from support.models import script_models as models
from support.models.script_models import COUPLED, PARTS, Scripted
from support.workers import Workers
from torch.utils import _pytree as pytree

import autopart
from autopart.extras.freezing import replan as replanning

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


CHUNK, SCRIPTS = 25, 2000
UNSTABLE = 2
"""Most scripts of a chunk whose training amplifies rounding so much that torch differs from itself."""
ALONE, PAIRED = (0, 1, 3, 4), (2001, 2004)


def outcomes_of(what: Drawn, pair: Workers | None) -> list[Outcome]:
    """Return the outcomes on all ranks."""
    with TemporaryDirectory() as folder:
        return [played_any(what, Path(folder))] if pair is None else pair.run(played_any, what, Path(folder))


def check(seeds: range | tuple[int, ...], pair: Workers | None, events: int = 12) -> list[Outcome]:
    """Run scripts in this process or on two ranks. Fails with the smallest script that still differs."""
    outcomes = []
    for seed in seeds:
        what = drawn_any(seed, events, alone=pair is None)
        found = outcomes_of(what, pair)
        wrong = [outcome.text for outcome in found if outcome.kind == "wrong"]
        if wrong and pair is None:
            what = smaller(what, lambda other: outcomes_of(other, None)[0].kind == "wrong")
        assert not wrong, f"script {seed}: {wrong[0]}\n{what}"
        outcomes.append(found[0])
    return outcomes


def test_scripts_on_one_rank_match_torch_or_are_refused() -> None:
    outcomes = check(ALONE, None)
    assert sum(outcome.calls for outcome in outcomes) > 12


def test_scripts_on_two_ranks_match_torch_or_are_refused(pair: Workers) -> None:
    outcomes = check(PAIRED, pair, 8)
    assert sum(outcome.calls for outcome in outcomes) > 3


def test_a_change_after_a_plan_that_was_refused_is_the_same_change_on_all_ranks(pair: Workers) -> None:
    events = (("freeze", 1), ("set", "temperature", 0.75), ("step", False))
    first = ("batch", 8, 4, 0, {})
    script = Script(("norm alone",), "rows", "square", 2, "groups", first, events, kept=True)
    assert [outcome.kind for outcome in outcomes_of(script, pair)] == ["equal"] * 2


def test_extra_state_that_a_sync_brings_is_no_change_where_it_is_equal(pair: Workers) -> None:
    script = Script(("extra",), "rows", "token", 2, "adam", ("batch", 8, 4, 0, {}), (("sync",), ("step", True)))
    assert [outcome.kind for outcome in outcomes_of(script, pair)] == ["equal"] * 2


def test_small_errors_of_a_loss_are_found_in_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = Piped.step
    monkeypatch.setattr(Piped, "step", lambda self: step(self) * (1 + 1e-8))
    found = [played(drawn(seed), tmp_path / str(seed)) for seed in (0, 1, 3)]
    assert all("loss  is" in outcome.text for outcome in found if outcome.kind == "wrong")
    assert any(outcome.kind == "wrong" for outcome in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", [f"{first}-{first + CHUNK - 1}" for first in range(0, SCRIPTS, CHUNK)])
def test_many_scripts_match_torch_or_are_refused(chunk: str, pair: Workers) -> None:
    """Every fourth chunk runs on two ranks."""
    first = int(chunk.partition("-")[0])
    outcomes = check(range(first, first + CHUNK), pair if first // CHUNK % 4 == 3 else None)
    assert sum(outcome.kind == "equal" for outcome in outcomes) >= CHUNK // 4
    assert sum(outcome.kind == "unstable" for outcome in outcomes) <= UNSTABLE

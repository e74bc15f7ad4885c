"""Random training scripts: a pipe computes what torch does, to the end or up to an error of autopart.

A script is drawn from a seed, so that a failure can be repeated and a long run resumed anywhere: `pytest -m slow
tests/e2e/test_random_scripts.py -k "1200-"`. Some seeds draw runs over a dataset that are killed and go on, and some
runs of a Trainer that are resumed.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.jobs.random_scripts import Drawn, Outcome, drawn, drawn_any, played, played_any, smaller
from support.jobs.script_players import Piped, Script
from support.workers import Workers

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

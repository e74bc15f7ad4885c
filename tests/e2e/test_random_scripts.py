"""Random training scripts: a pipe computes what torch does, to the end or up to an error of autopart.

A script is drawn from a seed, so that a failure can be repeated and a long run resumed anywhere: `pytest -m slow
tests/e2e/test_random_scripts.py -k "1200-"`.
"""

from __future__ import annotations

import pytest
from support.jobs.random_scripts import Outcome, Piped, drawn, played, smaller
from support.workers import Workers

CHUNK, SCRIPTS = 25, 2000
UNSTABLE = 2
"""Most scripts of a chunk whose training amplifies rounding so much that torch differs from itself."""
ALONE, PAIRED = range(4), range(2000, 2002)


def check(seeds: range, pair: Workers | None, events: int = 12) -> list[Outcome]:
    """Run scripts in this process or on two ranks. Fails with the smallest script that still differs."""
    outcomes = []
    for seed in seeds:
        script = drawn(seed, events)
        found = [played(script)] if pair is None else pair.run(played, script)
        wrong = [outcome.text for outcome in found if outcome.kind == "wrong"]
        if wrong and pair is None:
            script = smaller(script, lambda other: played(other).kind == "wrong")
        assert not wrong, f"script {seed}: {wrong[0]}\n{script}"
        outcomes.append(found[0])
    return outcomes


def test_scripts_on_one_rank_match_torch_or_are_refused() -> None:
    outcomes = check(ALONE, None)
    assert sum(outcome.calls for outcome in outcomes) > 12


def test_scripts_on_two_ranks_match_torch_or_are_refused(pair: Workers) -> None:
    outcomes = check(PAIRED, pair, 8)
    assert sum(outcome.calls for outcome in outcomes) > 3


def test_small_errors_of_a_loss_are_found_in_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Piped.step
    monkeypatch.setattr(Piped, "step", lambda self: step(self) * (1 + 1e-8))
    found = [played(drawn(seed)) for seed in ALONE]
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

"""Random training scripts: what a pipe computes is what plain torch does, to the end or up to an error of our own.

A script is drawn by its number, so that a failure can be played again and a long run can be taken up anywhere:
`pytest -m slow tests/e2e/test_random_scripts.py -k "1200-"`.
"""

from __future__ import annotations

import pytest
from support.jobs.random_scripts import Outcome, drawn, played, smaller

from autopart.runtime.launch.local import Workers

CHUNK, SCRIPTS = 25, 2000
ALONE, PAIRED = range(7), range(2000, 2003)


def check(seeds: range, pair: Workers | None, events: int = 12) -> list[Outcome]:
    """Play scripts here, or on two ranks; fails with the smallest script that differs as this one does."""
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


def test_scripts_on_one_rank_are_as_in_torch_or_refused() -> None:
    outcomes = check(ALONE, None)
    assert sum(outcome.calls for outcome in outcomes) > 20


def test_scripts_on_two_ranks_are_as_in_torch_or_refused(pair: Workers) -> None:
    outcomes = check(PAIRED, pair, 8)
    assert sum(outcome.calls for outcome in outcomes) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", [f"{first}-{first + CHUNK - 1}" for first in range(0, SCRIPTS, CHUNK)])
def test_many_scripts_are_as_in_torch_or_refused(chunk: str, pair: Workers) -> None:
    """Every fourth chunk on two ranks."""
    first = int(chunk.partition("-")[0])
    outcomes = check(range(first, first + CHUNK), pair if first // CHUNK % 4 == 3 else None)
    assert sum(outcome.kind == "equal" for outcome in outcomes) >= CHUNK // 4

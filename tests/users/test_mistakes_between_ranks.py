"""What two ranks do differently by mistake is an error or a warning that says what to do; alike on both it is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs.failures.rank_mistakes import MISTAKES, advised, right
from support.workers import Workers

from autopart.ir import errors

RAISED = {"StopIteration"}
"""What the script of a rank raises itself."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_rank_is_said_with_a_way_out(pair: Workers, tmp_path: Path, name: str) -> None:
    _, word, _ = MISTAKES[name]
    found = pair.run(advised, name, str(tmp_path / "run"))
    assert any(word in advice for _, advice in found), found
    assert all(not kind or kind in RAISED or hasattr(errors, kind) for kind, _ in found), found


def test_what_every_rank_does_is_not_warned_of(pair: Workers, tmp_path: Path) -> None:
    assert pair.run(right, str(tmp_path / "run")) == [[], []]

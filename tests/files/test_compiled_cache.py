"""What was measured in compiled code, on disk: read back as it was, and ignored where it is not valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopart.files import caches
from autopart.files.caches import CacheWarning, find_program, keep_program, program_path, write_kept

FOUND = ((5, 0, 0), (7, 9, 1 << 40))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path))


def test_a_program_is_read_back_as_it_was() -> None:
    assert find_program("a") is None
    keep_program("a", FOUND)
    assert find_program("a") == FOUND
    assert find_program("b") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        [],
        {"version": 1, "ops": []},
        {"version": 2, "ops": [[0, 1, 1]]},
        {"version": 2, "ops": [[1, -1, 1]]},
        {"version": 2, "ops": [[1, 1]]},
        {"version": 2, "ops": [[1, 1, 1.5]]},
        {"version": 2, "ops": [[86400 * 10**9, 1, 1]]},
        {"version": 2, "ops": [], "more": 1},
    ],
)
def test_what_is_not_valid_is_ignored_and_replaced(content: Any) -> None:
    write_kept(program_path("a"), content if isinstance(content, str) else json.dumps(content))
    with pytest.warns(CacheWarning, match="ignored"):
        assert find_program("a") is None
    keep_program("a", FOUND)
    assert find_program("a") == FOUND


def test_the_oldest_programs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST_PLANS", 2)
    for key in "abc":
        keep_program(key, FOUND)
    assert len(list(program_path("a").parent.glob("*.json"))) == 2

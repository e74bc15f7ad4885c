"""Measured times on disk: every way the file can be broken, and processes that write at the same time."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from autopart.files import storage
from autopart.files.cost_cache import CostCache, default_cost_path
from autopart.files.storage import cache_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "costs.json"


BROKEN: dict[str, Any] = {
    "empty": "",
    "truncated": '{"version": 1, "times": {',
    "a list": [],
    "no version": {"times": {}},
    "later version": {"version": 99, "times": {}},
    "times is a list": {"version": 1, "times": []},
    "place is a list": {"version": 1, "times": {"here": []}},
    "odd entries": {"version": 1, "times": {"here": {"a": [1], "b": [1.5, 2], "c": [-1, 2], "d": [True, 1], "e": "x"}}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cache_is_ignored_and_written_anew(path: Path, name: str) -> None:
    content = BROKEN[name]
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    cache = CostCache(path, "here")
    assert not any(cache.get(key) for key in "abcde")
    cache.put("good", (3, 4))
    cache.save()
    assert CostCache(path, "here").get("good") == (3, 4)


def test_binary_rubbish_is_no_cache(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00rubbish")
    assert CostCache(path, "here").get("a") is None


def test_two_processes_add_to_one_cache(path: Path) -> None:
    one, two = CostCache(path, "here"), CostCache(path, "here")
    one.put("a", (1, 2))
    two.put("b", (3, 4))
    one.save()
    two.save()
    assert CostCache(path, "here").get("a") == (1, 2) and CostCache(path, "here").get("b") == (3, 4)
    assert CostCache(path, "elsewhere").get("a") is None


WRITERS, ENTRIES = 4, 15


def add_entries(path: Path, writer: int, everyone: Any) -> None:
    everyone.wait()
    for i in range(ENTRIES):
        cache = CostCache(path, f"place {writer % 2}")
        cache.put(f"{writer}.{i}", (writer, i))
        cache.save()


def test_processes_that_save_at_the_same_time_lose_nothing(path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    everyone = fork.Barrier(WRITERS)
    writers = [fork.Process(target=add_entries, args=(path, writer, everyone)) for writer in range(WRITERS)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    places = [CostCache(path, f"place {i}") for i in range(2)]
    for writer in range(WRITERS):
        for i in range(ENTRIES):
            assert places[writer % 2].get(f"{writer}.{i}") == (writer, i)


def test_a_failed_save_leaves_the_old_file_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CostCache(path, "here")
    cache.put("a", (1, 2))
    cache.save()
    cache.put("b", (3, 4))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        cache.save()
    assert sorted(os.listdir(path.parent)) == ["costs.json", "costs.json.lock"]
    assert CostCache(path, "here").get("a") == (1, 2) and CostCache(path, "here").get("b") is None
    cache.save()
    assert CostCache(path, "here").get("b") == (3, 4)


def test_where_the_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOPART_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "autopart"
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert default_cost_path() == tmp_path / "own" / "costs.json"

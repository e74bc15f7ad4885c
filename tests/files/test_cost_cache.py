"""Measured times on disk: every way the file can be broken, and processes that write at the same time."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from autopart.files import caches, storage
from autopart.files.caches import CacheWarning, cost_path, keep_times, read_times, write_kept
from autopart.files.storage import cache_folder


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "deep"))
    return tmp_path / "deep" / "costs.json"


BROKEN: dict[str, Any] = {
    "empty": "",
    "truncated": '{"version": 1, "times": {',
    "a list": [],
    "no version": {"times": {}},
    "later version": {"version": 99, "times": {}},
    "times is a list": {"version": 1, "times": []},
    "place is a list": {"version": 1, "times": {"here": []}},
    "an entry of one": {"version": 1, "times": {"here": {"a": [1]}}},
    "a fraction": {"version": 1, "times": {"here": {"a": [1.5, 2]}}},
    "negative": {"version": 1, "times": {"here": {"a": [-1, 2]}}},
    "negative backward": {"version": 1, "times": {"here": {"a": [1, -2]}}},
    "true": {"version": 1, "times": {"here": {"a": [True, 1]}}},
    "a text": {"version": 1, "times": {"here": {"a": "x"}}},
    "all zero": {"version": 1, "times": {"here": {"a": [0, 0], "b": [0, 0]}}},
    "a day": {"version": 1, "times": {"here": {"a": [86400 * 10**9, 1]}}},
    "400 digits": '{"version": 1, "times": {"here": {"a": [1%s, 1]}}}' % ("0" * 400),
    "infinite": '{"version": 1, "times": {"here": {"a": [Infinity, 1]}}}',
    "deep": "[" * 100_000,
    "deep and closed": "[" * 100_000 + "]" * 100_000,
    "an escape sequence": '{"version": 1, "times": {"\\u001b[2J": {"\\u001b]0;x": [0, 0]}}}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cache_is_ignored_and_written_anew(path: Path, name: str) -> None:
    content = BROKEN[name]
    text = content if isinstance(content, str) else json.dumps(content)
    write_kept(path, text)
    with pytest.warns(CacheWarning, match="ignored") as told:
        assert read_times("here") == {}
    assert all(str(each.message).replace("\n", "").isprintable() for each in told)
    with pytest.warns(CacheWarning):
        keep_times("here", {"good": (3, 4)})
    assert read_times("here") == {"good": (3, 4)}


def test_times_that_no_op_takes_are_not_kept(path: Path) -> None:
    keep_times("here", {"zero": (0, 0), "negative": (1, -1), "long": (10**19, 1)})
    assert not path.exists()


def test_the_newest_times_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST_COSTS", 3)
    for place, keys in (("here", "ab"), ("there", "cd"), ("here", "e")):
        keep_times(place, {key: (1, 1) for key in keys})
    assert sorted([*read_times("here"), *read_times("there")]) == ["b", "d", "e"]


def test_binary_rubbish_is_no_cache(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00rubbish")
    with pytest.warns(CacheWarning, match="not UTF-8"):
        assert read_times("here") == {}


def test_times_are_added_to_those_of_others() -> None:
    keep_times("here", {"a": (1, 2)})
    keep_times("here", {"b": (3, 4)})
    assert read_times("here") == {"a": (1, 2), "b": (3, 4)} and read_times("elsewhere") == {}


WRITERS, ENTRIES = 4, 15


def add_entries(writer: int, everyone: Any) -> None:
    everyone.wait()
    for i in range(ENTRIES):
        keep_times(f"place {writer % 2}", {f"{writer}.{i}": (1 + writer, i)})


def test_processes_that_save_at_the_same_time_lose_nothing() -> None:
    fork = multiprocessing.get_context("fork")
    everyone = fork.Barrier(WRITERS)
    writers = [fork.Process(target=add_entries, args=(writer, everyone)) for writer in range(WRITERS)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    places = [read_times(f"place {i}") for i in range(2)]
    for writer in range(WRITERS):
        for i in range(ENTRIES):
            assert places[writer % 2][f"{writer}.{i}"] == (1 + writer, i)


def test_a_failed_save_leaves_the_old_file_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_times("here", {"a": (1, 2)})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        keep_times("here", {"b": (3, 4)})
    assert sorted(os.listdir(path.parent)) == ["costs.json", "costs.json.lock"]
    assert read_times("here") == {"a": (1, 2)}
    keep_times("here", {"b": (3, 4)})
    assert read_times("here")["b"] == (3, 4)


def test_where_the_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOPART_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "autopart"
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert cost_path() == tmp_path / "own" / "costs.json"

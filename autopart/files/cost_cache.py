"""Measured times of ops on disk: {"version", "times": {environment: {key: [forward ns, backward ns]}}}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopart.files.storage import cache_folder, locked, write_whole

_VERSION = 1

OpTimes = tuple[int, int]
"""Nanoseconds of forward and backward of one op."""


def default_cost_path() -> Path:
    """costs.json in the cache folder."""
    return cache_folder() / "costs.json"


class CostCache:
    """The times that were measured in one environment, by key of the op.

    What cannot be read is ignored and written anew; a folder that cannot be written to is no error.
    """

    def __init__(self, path: Path, environment: str) -> None:
        """environment: what the times depend on besides the op, such as the processor and torch's version."""
        self._path, self._environment = path, environment
        self._times = _read(path).get(environment, {})
        self._new: dict[str, OpTimes] = {}

    def get(self, key: str) -> OpTimes | None:
        """Times of an op measured in this environment before."""
        return self._times.get(key)

    def put(self, key: str, times: OpTimes) -> None:
        """Remember the times of an op."""
        if self._times.get(key) != times:
            self._times[key] = self._new[key] = times

    def save(self) -> None:
        """Add what is new to the file.  What other processes add at the same time is kept too."""
        if not self._new:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._path):
                everything = _read(self._path)
                everything.setdefault(self._environment, {}).update(self._new)
                write_whole(self._path, json.dumps({"version": _VERSION, "times": everything}))
        except OSError:
            return
        self._new.clear()


def _read(path: Path) -> dict[str, dict[str, OpTimes]]:
    """The valid entries of a cache file; nothing when it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return {}
    times = content.get("times")
    if not isinstance(times, dict):
        return {}
    return {place: dict(_valid(entries)) for place, entries in times.items() if isinstance(entries, dict)}


def _valid(entries: dict[str, Any]) -> Iterator[tuple[str, OpTimes]]:
    for key, entry in entries.items():
        if isinstance(entry, list) and len(entry) == 2 and all(type(n) is int and n >= 0 for n in entry):
            yield key, (entry[0], entry[1])

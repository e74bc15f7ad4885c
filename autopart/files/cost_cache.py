"""Measured times of ops on disk: {"version", "times": {environment: {key: [forward ns, backward ns]}}}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from autopart.files.json_text import parse_json
from autopart.files.kept import kept_source, make_private, read_kept, warn_ignored, write_kept
from autopart.files.limits import MAX_OP_NS, MOST_COSTS
from autopart.files.storage import cache_folder, locked
from autopart.ir.errors import AutopartError

_VERSION = 1
_NO_TIMES = "holds no times of ops"

OpTimes = tuple[int, int]
"""Nanoseconds of forward and backward of one op."""
_Times = dict[str, dict[str, OpTimes]]


def default_cost_path() -> Path:
    """costs.json in the cache folder."""
    return cache_folder() / "costs.json"


class CostCache:
    """The times that were measured in one environment, by key of the op.

    What cannot be read or believed is ignored with a warning and written anew; a folder that cannot be written to is
    no error.
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
        """Remember the times of an op; what no op can take is not kept."""
        if self._times.get(key) != times and _is_time(*times):
            self._times[key] = self._new[key] = times

    def save(self) -> None:
        """Add what is new to the file.  What other processes add at the same time is kept too."""
        if not self._new:
            return
        with suppress(OSError, AutopartError):
            make_private(self._path.parent)
            with locked(self._path):
                everything = _read(self._path)
                mine = everything.pop(self._environment, {})
                everything[self._environment] = {**{k: t for k, t in mine.items() if k not in self._new}, **self._new}
                write_kept(self._path, json.dumps({"version": _VERSION, "times": _newest(everything)}))
            self._new.clear()


def _newest(everything: _Times) -> _Times:
    """The last `MOST_COSTS` entries: a file that grew for ever would one day be too large to read."""
    excess = sum(map(len, everything.values())) - MOST_COSTS
    kept: _Times = {}
    for place, entries in everything.items():
        kept[place] = dict(islice(entries.items(), max(0, excess), None))
        excess -= len(entries)
    return {place: entries for place, entries in kept.items() if entries}


def _read(path: Path) -> _Times:
    """The entries of a cache file; nothing when it is missing, or not believed."""
    try:
        text = read_kept(path)
        return {} if text is None else _times_of(text, path)
    except AutopartError as error:
        warn_ignored(path, error)
        return {}


def _times_of(text: str, path: Path) -> _Times:
    """What a text says.  Raises AutopartError for anything that is no time of an op."""
    source = kept_source(path)
    content = parse_json(text, source)
    times = content.get("times") if isinstance(content, dict) else None
    if not isinstance(content, dict) or content.get("version") != _VERSION or not isinstance(times, dict):
        raise source.error(
            "holds no times of ops", where="version, times", why=f"this release reads version {_VERSION}"
        )
    found: _Times = {}
    for place, entries in times.items():
        if not isinstance(entries, dict):
            raise source.error(_NO_TIMES, where=f"times.{place}", why="must be a table")
        found[place] = dict(_valid(entries))
        if len(found[place]) < len(entries):
            bad = next(key for key in entries if key not in found[place])
            why = f"times are two whole numbers of nanoseconds, the first above 0, up to {MAX_OP_NS}"
            raise source.error(_NO_TIMES, where=f"times.{place}.{bad}", why=why)
    return found


def _valid(entries: dict[str, Any]) -> Iterator[tuple[str, OpTimes]]:
    for key, entry in entries.items():
        if isinstance(entry, list) and len(entry) == 2 and _is_time(*entry):
            yield key, (entry[0], entry[1])


def _is_time(forward: object, backward: object) -> bool:
    """Every op takes time: zeros would make a plan that nothing speaks for."""
    if type(forward) is not int or type(backward) is not int:
        return False
    return 0 < forward <= MAX_OP_NS and 0 <= backward <= MAX_OP_NS

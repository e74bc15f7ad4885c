"""Keep measured times of ops on disk: {"version", "times": {environment: {key: [forward ns, backward ns]}}}."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopart.files.json_text import parse_json
from autopart.files.kept import kept_source, make_private, read_kept, warn_ignored, write_kept
from autopart.files.limits import MAX_OP_NS, MOST_COSTS
from autopart.files.reading import listed
from autopart.files.storage import cache_folder, locked
from autopart.files.validation import problems_of
from autopart.ir.errors import AutopartError

_VERSION = 1

OpTimes = tuple[int, int]
"""Nanoseconds of forward and backward of one op."""
_Times = dict[str, dict[str, OpTimes]]


_Forward = Annotated[int, Field(gt=0, le=MAX_OP_NS)]
_Backward = Annotated[int, Field(ge=0, le=MAX_OP_NS)]


class _File(BaseModel):
    """Every op takes time: a forward of 0 ns would make plans look fast for no reason."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    times: dict[str, dict[str, tuple[_Forward, _Backward]]]


def default_cost_path() -> Path:
    """costs.json in the cache folder."""
    return cache_folder() / "costs.json"


class CostCache:
    """Hold the times that were measured in one environment, by key of the op.

    A file that cannot be read or believed is ignored with a warning and replaced; a folder that cannot be written to is
    not an error.
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
        if self._times.get(key) != times and _is_time(times):
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
    """Return what a text says.  Raises AutopartError for anything that is not the time of an op."""
    source = kept_source(path)
    try:
        parse_json(text, source)  # the limits of every file, and no key twice
        return _File.model_validate_json(text).times
    except ValidationError as error:
        problems = listed(f"{path}: {message}" for path, message in problems_of(error))
        raise source.error("holds no times of ops", why=problems) from error


def _is_time(times: OpTimes) -> bool:
    """Tell whether an op can take these times; zeros would make plans look fast for no reason."""
    return 0 < times[0] <= MAX_OP_NS and 0 <= times[1] <= MAX_OP_NS

"""Keep measured times of ops on disk: {"version", "times": {environment: {key: [forward ns, backward ns]}}}.

A file that cannot be read is ignored with a warning and replaced.  A folder that cannot be written to is not
an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autopart.files.caches.kept import make_private, read_kept, write_kept
from autopart.files.json_text import parse_json
from autopart.files.limits import MAX_OP_NS, MOST_COSTS
from autopart.files.reading import validated
from autopart.files.storage import cache_folder, locked

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


def cost_path() -> Path:
    """Return the file of all times: costs.json in the cache folder."""
    return cache_folder() / "costs.json"


def read_times(environment: str) -> dict[str, OpTimes]:
    """Return the times measured in an environment (processor, torch version, ...), by key of the op."""
    return _read().get(environment, {})


def keep_times(environment: str, times: Mapping[str, OpTimes]) -> None:
    """Add new times to the file, besides those that other processes add.  Times that no op can take are left out."""
    new = {key: (fwd, bwd) for key, (fwd, bwd) in times.items() if 0 < fwd <= MAX_OP_NS and 0 <= bwd <= MAX_OP_NS}
    if not new:
        return
    path = cost_path()
    with suppress(OSError):
        make_private(path.parent)
        with locked(path):
            everything = _read()
            known = everything.pop(environment, {})
            everything[environment] = {**{key: known[key] for key in known if key not in new}, **new}
            write_kept(path, json.dumps({"version": 1, "times": _newest(everything)}))


def _newest(everything: _Times) -> _Times:
    """Return the last `MOST_COSTS` entries, so that the file never becomes too large to read."""
    excess = sum(map(len, everything.values())) - MOST_COSTS
    kept: _Times = {}
    for place, entries in everything.items():
        kept[place] = dict(islice(entries.items(), max(0, excess), None))
        excess -= len(entries)
    return {place: entries for place, entries in kept.items() if entries}


def _read() -> _Times:
    return read_kept(cost_path(), _parsed) or {}


def _parsed(text: str) -> _Times:
    """Return the times in a text.  Raises `unreadable`."""
    parse_json(text)  # the limits of every file, and no key twice
    return validated("holds no times of ops", _File.model_validate_json, text).times

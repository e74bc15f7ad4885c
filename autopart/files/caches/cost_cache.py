"""Keep measured costs of ops on disk.

costs.json: {"version", "times": {environment: {key: [forward ns, backward ns]}}}.  compiled/<key>.json: what was
measured of a program in compiled code, under a key made from all that the numbers depend on: program, torch, processor
(`extras.compiled.compiled_costs`).

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

from autopart.files.caches.kept import make_private, read_kept, remove_oldest, write_kept
from autopart.files.json_text import parse_json
from autopart.files.limits import MAX_INTEGER, MAX_OP_NS, MOST_COSTS, MOST_PLANS
from autopart.files.reading import validated
from autopart.files.storage import cache_folder, locked

OpTimes = tuple[int, int]
"""Nanoseconds of forward and backward of one op."""
OpCost = tuple[int, int, int]
"""Nanoseconds of the forward and of the backward of an op, and the bytes that it keeps from one to the other."""
_Times = dict[str, dict[str, OpTimes]]
_Forward = Annotated[int, Field(gt=0, le=MAX_OP_NS)]
_Backward = Annotated[int, Field(ge=0, le=MAX_OP_NS)]


class _File(BaseModel):
    """Every op takes time: a forward of 0 ns would make plans look fast for no reason."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    times: dict[str, dict[str, tuple[_Forward, _Backward]]]


class _Program(BaseModel):
    """The ops of one program, in order."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[2]
    ops: list[tuple[_Forward, _Backward, Annotated[int, Field(ge=0, le=MAX_INTEGER)]]]


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


def program_path(key: str) -> Path:
    """Return the file of a program."""
    return cache_folder() / "compiled" / f"{key}.json"


def find_program(key: str) -> tuple[OpCost, ...] | None:
    """Return what was measured of each op of this program, in order, None if nothing valid is kept."""
    return read_kept(program_path(key), _parsed_program)


def keep_program(key: str, found: tuple[OpCost, ...]) -> None:
    """Keep what was measured of a program, and remove the oldest programs above `MOST_PLANS`."""
    path = program_path(key)
    with suppress(OSError):
        write_kept(path, json.dumps({"version": 2, "ops": found}))
        remove_oldest(path.parent, MOST_PLANS)


def _parsed_program(text: str) -> tuple[OpCost, ...]:
    """Return what a text holds.  Raises `unreadable`."""
    parse_json(text)
    return tuple(validated("holds no costs of compiled code", _Program.model_validate_json, text).ops)

"""What is kept between runs: plans, measured costs, costs of compiled code, in a folder of this user's own.

plans/<key>.json: a plan file; the planner makes the key from everything that the plan depends on
(`planning.make.plan_key`).  costs.json: {"version", "times": {environment: {key: [forward ns, backward ns]}}}.
compiled/<key>.json: what was measured of a program in compiled code, under a key made from all that the numbers depend
on: program, torch, processor (`extras.compiled.compiled_costs`).

Content is validated like that of any other file.  A file that is not valid is ignored with a `CacheWarning` and
replaced.  A folder that cannot be written to is not an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from autopart.files.limits import MAX_INTEGER, MAX_OP_NS, MOST_COSTS, MOST_PLANS
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.files.reading import named, read_text, validated
from autopart.files.storage import cache_folder, locked, write_whole
from autopart.ir.errors import AutopartError, printable
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan, check

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
Content = TypeVar("Content")


class CacheWarning(UserWarning):
    """Warns that a kept file was ignored; a new one replaces it."""


def read_kept(path: Path, parse: Callable[[str], Content]) -> Content | None:
    """Return what `parse` makes of the text of a kept file; None if there is no file, or one to ignore.

    parse: raises AutopartError, or `unreadable`, for content that is not valid.
    """
    try:
        with named(path, AutopartError):
            return parse(read_text(path))
    except AutopartError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            warnings.warn(printable(f"{path} is ignored and replaced: {error}", keep="\n"), CacheWarning, stacklevel=3)
        return None


def write_kept(path: Path, text: str) -> None:
    """Write a kept file; missing folders are made, for this user alone.  Raises OSError."""
    _make_private(path.parent)
    write_whole(path, text, mode=_PRIVATE_FILE)


def _make_private(folder: Path) -> None:
    """Make a folder and missing folders above it, for this user alone.  Raises OSError."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    for above in reversed(missing):
        above.mkdir(_PRIVATE_FOLDER, exist_ok=True)


def _remove_oldest(folder: Path) -> None:
    """Remove the oldest JSON files of a folder above `MOST_PLANS`; another process may do so at the same time."""
    aged = []
    for path in folder.glob("*.json"):
        with suppress(OSError):
            aged.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(aged)[: max(0, len(aged) - MOST_PLANS)]:
        with suppress(OSError):
            os.unlink(path)


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_path(key: str) -> Path:
    """Return the file of a plan."""
    return cache_folder() / "plans" / f"{key}.json"


def find_plan(key: str, graph: Graph) -> Plan | None:
    """Return the plan for this graph that is kept under this key, None if there is no valid one."""
    path = plan_path(key)
    return read_kept(path, lambda text: check(plan_from_json(text, os.fspath(path)), graph))


def keep_plan(key: str, plan: Plan) -> None:
    """Keep a plan under this key, and remove the oldest plans above `MOST_PLANS`."""
    path = plan_path(key)
    with suppress(AutopartError, OSError):
        write_kept(path, plan_to_json(plan))
        _remove_oldest(path.parent)


@lru_cache(maxsize=1)
def planner_digest() -> str:
    """Return a digest of the code that makes plans: every source file below `ir` and `passes`."""
    home = Path(__file__).resolve().parents[1]
    return digest_of_sources(home / "ir", home / "passes")


def digest_of_sources(*folders: Path) -> str:
    """Return a digest of the names and contents of all Python files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        root = folder.resolve()  # a link is not followed unless it is resolved first
        for path in sorted(root.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{folder.name}/{path.relative_to(root).as_posix()} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()


# ---- costs -----------------------------------------------------------------------------------------------------------

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
    ops: tuple[tuple[_Forward, _Backward, Annotated[int, Field(ge=0, le=MAX_INTEGER)]], ...]


def cost_path() -> Path:
    """Return the file of all times: costs.json in the cache folder."""
    return cache_folder() / "costs.json"


def read_times(environment: str) -> dict[str, OpTimes]:
    """Return the times measured in an environment (processor, torch version, ...), by key of the op."""
    return _all_times().get(environment, {})


def keep_times(environment: str, times: Mapping[str, OpTimes]) -> None:
    """Add new times to the file, besides those that other processes add.  Times that no op can take are left out."""
    new = {key: (fwd, bwd) for key, (fwd, bwd) in times.items() if 0 < fwd <= MAX_OP_NS and 0 <= bwd <= MAX_OP_NS}
    if not new:
        return
    path = cost_path()
    with suppress(OSError):
        _make_private(path.parent)
        with locked(path):
            everything = _all_times()
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


def _all_times() -> _Times:
    what = "holds no times of ops"
    return read_kept(cost_path(), lambda text: validated(what, _File.model_validate_json, text).times) or {}


def program_path(key: str) -> Path:
    """Return the file of a program."""
    return cache_folder() / "compiled" / f"{key}.json"


def find_program(key: str) -> tuple[OpCost, ...] | None:
    """Return what was measured of each op of this program, in order, None if nothing valid is kept."""
    what = "holds no costs of compiled code"
    return read_kept(program_path(key), lambda text: validated(what, _Program.model_validate_json, text).ops)


def keep_program(key: str, found: tuple[OpCost, ...]) -> None:
    """Keep what was measured of a program, and remove the oldest programs above `MOST_PLANS`."""
    path = program_path(key)
    with suppress(OSError):
        write_kept(path, json.dumps({"version": 2, "ops": found}))
        _remove_oldest(path.parent)

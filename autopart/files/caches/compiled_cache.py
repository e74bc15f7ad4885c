"""Keep what was measured in compiled code on disk: <cache folder>/compiled/<key>.json, a file for each program.

The key is made from all that the numbers depend on: program, torch, processor (`extras.compiled.compiled_costs`).  A
file that is not valid is ignored with a warning and replaced.  A folder that cannot be written to is not an error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autopart.files.caches.kept import read_kept, remove_oldest, write_kept
from autopart.files.json_text import parse_json
from autopart.files.limits import MAX_INTEGER, MAX_OP_NS, MOST_PLANS
from autopart.files.reading import validated
from autopart.files.storage import cache_folder

OpCost = tuple[int, int, int]
"""Nanoseconds of the forward and of the backward of an op, and the bytes that it keeps from one to the other."""


class _File(BaseModel):
    """Every op takes time, as in the file of the other costs."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[2]
    ops: list[
        tuple[
            Annotated[int, Field(gt=0, le=MAX_OP_NS)],
            Annotated[int, Field(ge=0, le=MAX_OP_NS)],
            Annotated[int, Field(ge=0, le=MAX_INTEGER)],
        ]
    ]


def program_path(key: str) -> Path:
    """Return the file of a program."""
    return cache_folder() / "compiled" / f"{key}.json"


def find_program(key: str) -> tuple[OpCost, ...] | None:
    """Return what was measured of each op of this program, in order, None if nothing valid is kept."""
    return read_kept(program_path(key), _parsed)


def keep_program(key: str, found: tuple[OpCost, ...]) -> None:
    """Keep what was measured of a program, and remove the oldest programs above `MOST_PLANS`."""
    path = program_path(key)
    with suppress(OSError):
        write_kept(path, json.dumps({"version": 2, "ops": found}))
        remove_oldest(path.parent, MOST_PLANS)


def _parsed(text: str) -> tuple[OpCost, ...]:
    """Return what a text holds.  Raises `unreadable`."""
    parse_json(text)  # the limits of every file, and no key twice
    return tuple(validated("holds no costs of compiled code", _File.model_validate_json, text).ops)

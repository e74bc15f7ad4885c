"""Files of a checkpoint as they were written: names, sizes and hashes.  Needs no torch, so that a check is quick."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from autopart.files.reading import open_regular
from autopart.ir.errors import CheckpointError

AGAIN = "use another checkpoint, or copy this one again from where it is whole"
"""What to do about a file that was changed or is missing."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written.  size_bytes: of the whole file.  sha256: of its bytes, in hexadecimal."""

    size_bytes: int
    sha256: str


def hashed(path: Path) -> Written:
    """Return the size and the hash of a file.  Raises OSError."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Written(os.fstat(file.fileno()).st_size, digest)


def unreadable_file(path: Path, error: Exception) -> CheckpointError:
    """Return what to say of a file that is missing or cannot be read."""
    missing = isinstance(error, FileNotFoundError)
    what = "is missing" if missing else "cannot be read"
    return CheckpointError(f"{path.name} {what}", where=str(path), why="" if missing else str(error), fix=AGAIN)


def plain_name(name: str) -> bool:
    """Whether this is the name of a file in the folder itself, not a path that leads out of it."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")

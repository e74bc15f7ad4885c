"""Plans made before, on disk: <cache folder>/plans/<key>.json.

The key is made by whoever plans, from everything that a plan follows from (`planning.plan_key`).  A file is read and
validated like any plan file, and one that is not valid is not found; a folder that cannot be written to is no error.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from autopart.files.plans import load_plan, save_plan
from autopart.files.storage import cache_folder
from autopart.ir.errors import AutopartError
from autopart.ir.plan import Plan

MOST_PLANS = 200
"""Files that are kept, the newest."""


def plan_path(key: str) -> Path:
    """The file of a plan."""
    return cache_folder() / "plans" / f"{key}.json"


def find_plan(key: str) -> Plan | None:
    """The plan that was kept under this key, if there is a valid file.  Anyone may have written to it: whether it
    answers the question behind the key is for the caller to check."""
    try:
        return load_plan(plan_path(key))
    except AutopartError:
        return None


def keep_plan(key: str, plan: Plan) -> None:
    """Keep a plan under this key, and of all plans the newest."""
    path = plan_path(key)
    with suppress(AutopartError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plan(plan, path)
        _remove_oldest(path.parent)


@lru_cache(maxsize=1)
def planner_digest() -> str:
    """A digest of the code that makes plans: every source file of `ir` and `passes` and their sub-folders."""
    home = Path(__file__).resolve().parents[1]
    return digest_of_sources(home / "ir", home / "passes")


def digest_of_sources(*folders: Path) -> str:
    """A digest of the names and contents of all Python files below these folders."""
    digest = hashlib.sha256()
    for folder in folders:
        root = folder.resolve()  # a link is not followed unless it is resolved first
        for path in sorted(root.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{folder.name}/{path.relative_to(root).as_posix()} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()


def _remove_oldest(folder: Path) -> None:
    """Remove the oldest files above the limit; another process may do so at the same time."""
    aged = []
    for path in folder.glob("*.json"):
        with suppress(OSError):
            aged.append((path.stat().st_mtime_ns, path))
    excess = max(0, len(aged) - MOST_PLANS)
    for _, path in sorted(aged)[:excess]:
        with suppress(OSError):
            os.unlink(path)

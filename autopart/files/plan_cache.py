"""Keep plans on disk: <cache folder>/plans/<key>.json.

The planner makes the key from everything that a plan follows from (`planning.plan_key`).  A file is read under the
rules of `kept`, validated like any plan file, and checked against its question by the caller; one that fails is ignored
with a warning.  A folder that cannot be written to is not an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from autopart.files.kept import read_kept, warn_ignored, write_kept
from autopart.files.limits import MOST_PLANS
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.files.storage import cache_folder
from autopart.ir.errors import AutopartError
from autopart.ir.plan import Plan


def plan_path(key: str) -> Path:
    """Return the file of a plan."""
    return cache_folder() / "plans" / f"{key}.json"


def find_plan(key: str, check: Callable[[Plan], object]) -> Plan | None:
    """Return the plan that was kept under this key; None when there is none, or one that is not believed.

    check: raises AutopartError for a plan that cannot be the answer; that one is ignored with a warning.
    """
    path = plan_path(key)
    try:
        text = read_kept(path)
        if text is None:
            return None
        plan = plan_from_json(text, os.fspath(path))
        check(plan)
    except AutopartError as error:
        warn_ignored(path, error)
        return None
    return plan


def keep_plan(key: str, plan: Plan) -> None:
    """Keep a plan under this key, and remove the oldest plans above `MOST_PLANS`."""
    path = plan_path(key)
    with suppress(AutopartError, OSError):
        write_kept(path, plan_to_json(plan))
        _remove_oldest(path.parent)


@lru_cache(maxsize=1)
def planner_digest() -> str:
    """Digest the code that makes plans: every source file of `ir` and `passes` and their sub-folders."""
    home = Path(__file__).resolve().parents[1]
    return digest_of_sources(home / "ir", home / "passes")


def digest_of_sources(*folders: Path) -> str:
    """Digest the names and contents of all Python files below these folders."""
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

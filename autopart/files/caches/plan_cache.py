"""Keep plans on disk: <cache folder>/plans/<key>.json.

The planner makes the key from everything that a plan depends on (`planning.make.plan_key`).  A file is validated
like any plan file, and checked against the graph; one that fails is ignored with a warning.
A folder that cannot be written to is not an error.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from autopart.files.caches.kept import read_kept, remove_oldest, write_kept
from autopart.files.limits import MOST_PLANS
from autopart.files.plans import plan_from_json, plan_to_json
from autopart.files.storage import cache_folder
from autopart.ir.errors import AutopartError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan, check


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
        remove_oldest(path.parent, MOST_PLANS)


@lru_cache(maxsize=1)
def planner_digest() -> str:
    """Return a digest of the code that makes plans: every source file below `ir` and `passes`."""
    home = Path(__file__).resolve().parents[2]
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

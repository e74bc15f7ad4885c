"""Six clusters compared for Llama-3 8B, from its configuration file alone: at most 30 s, from the start of the command.

    python -m benchmarks.planning.compare

The command line runs in a process of its own, without plans kept from before, and its JSON is recorded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.shared.common import ROOT, write

CONFIG = ROOT / "tests/support/shelf/llama-3-8b.json"
CLUSTERS = "h100x8:4,h100x8:8,h100x8:16,a100x8:8,a100x8:16,h200x8:8"
MOST_SECONDS = 30.0
FLAGS = ("--tokens", "4096", "--rows", "512", "--optimizer", "adamw+masters", "--compare", CLUSTERS, "--json")


def compared() -> tuple[dict[str, Any], float]:
    """Return the comparison, and the wall seconds of the command."""
    with tempfile.TemporaryDirectory() as cache:
        words = [sys.executable, "-m", "autopart", "plan", str(CONFIG), *FLAGS]
        began = time.perf_counter()
        ended = subprocess.run(
            words, capture_output=True, text=True, check=True, env={**os.environ, "AUTOPART_CACHE": cache}
        )
        return json.loads(ended.stdout), time.perf_counter() - began


def main() -> None:
    found, seconds = compared()
    answers = found["answers"]
    claims = {
        f"six clusters in {seconds:.1f} s, at most {MOST_SECONDS:g}": seconds <= MOST_SECONDS,
        "every cluster has a plan": len(answers) == 6 and all("refused" not in answer for answer in answers),
    }
    write("compare", {"claims": claims, "wall_s": seconds, **found})
    for answer in answers:
        print(f"{answer['name']:10s} {answer.get('step_s', 0):6.2f} s  MFU {answer.get('mfu', 0):.1%}")
    for claim, holds in claims.items():
        print("met   " if holds else "MISSED", claim)


if __name__ == "__main__":
    main()

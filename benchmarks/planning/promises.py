"""Whether a free plan is ever slower than one that is asked for a schedule, and one for more than one for less.

Random clusters of up to three devices of up to three kinds, and chains of up to six layers, at times with a long one
(`tests/support/oracles/drawn_clusters.py`). Names: each case is planned freely and under every schedule by name. More:
each case is planned again with more memory, faster links, or more devices. Plans are compared by the planner's own
criterion, in which more stages and other orders have to be worth it. Everything is simulated.

    python -m benchmarks.planning.promises                   all; writes results/promises.json
    python -m benchmarks.planning.promises --part names --seeds 0 100      a part; other recorded cases are kept
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.shared.common import recorded, write

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.oracles.drawn_clusters import CLOSE, EQUAL, beside_less, beside_names, drawn

CASES = {"names": 200, "more": 300}


def result(part: str, seed: int) -> dict[str, Any]:
    """Return the worst ratio of a case, 0 where nothing fits, and what it is of."""
    began, problem = time.process_time(), drawn(seed, devices=3, layers=6)
    if part == "names":
        what, worst = max(beside_names(problem).items(), key=lambda item: item[1], default=("nothing fits", 0.0))
    else:
        what, worst = beside_less(problem, Random(seed)) or ("nothing fits", 0.0)
    return {"what": what, "worst": worst, "seconds": time.process_time() - began}


def claims_of(done: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return what is claimed of the cases that were run, and whether it holds."""
    claims = {}
    for part, limit, text in (
        ("names", EQUAL, "auto is nowhere worse than a schedule by name by more than"),
        ("more", CLOSE, "more memory, faster links or more devices make no plan worse by more than"),
    ):
        found = done[part]
        if not found:
            continue
        worst = max(each["worst"] for each in found.values())
        claims[f"{text} {limit - 1:.1%}: {worst - 1:+.2%} in {len(found)} cases"] = worst <= limit
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(CASES))
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FROM", "TO"))
    given = parser.parse_args()
    done: dict[str, dict[str, Any]] = {part: {} for part in CASES}
    if given.part or given.seeds:
        done |= recorded("promises", "cases")
    for part in [given.part] if given.part else CASES:
        first, end = given.seeds or (0, CASES[part])
        for seed in range(first, end):
            found = done[part][str(seed)] = result(part, seed)
            if found["worst"] > (EQUAL if part == "names" else CLOSE):
                print(f"{part} {seed}: {found['worst'] - 1:+.2%}, {found['what']}", flush=True)
            write("promises", {"claims": claims_of(done), "cases": done})
    for claim, holds in claims_of(done).items():
        print("met   " if holds else "MISSED", claim)


if __name__ == "__main__":
    main()

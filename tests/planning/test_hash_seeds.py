"""The same plans in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PRINTED = """
from support.oracles.drawn_clusters import drawn, found_for
print([(e.step_ns, e.candidate, e.decision.stages) for e in found_for(drawn(13, devices=3, layers=6)).ranked])
"""


def test_plans_are_equal_in_processes_with_other_hash_seeds() -> None:
    texts = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        ran = subprocess.run([sys.executable, "-c", PRINTED], env=env, capture_output=True, check=True, timeout=300)
        texts.append(ran.stdout)
    assert texts[0] == texts[1] and len(texts[0]) > 1000

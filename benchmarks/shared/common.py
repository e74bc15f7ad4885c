"""Shared code of the benchmarks: spread of repeated runs, the machine, and result files with the command."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autopart.ir.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", ROOT / "benchmarks/results"))
"""The variable is for a trial: what was recorded stays as it is."""


@dataclass(frozen=True)
class Spread:
    """Seconds of repeated runs: median, quartiles and extremes."""

    median: float
    low: float
    high: float
    minimum: float
    maximum: float
    runs: int

    def __str__(self) -> str:
        return f"{self.median:.4f} s  [{self.low:.4f}, {self.high:.4f}]  min {self.minimum:.4f}"


def spread(seconds: Sequence[float]) -> Spread:
    """Return the median and quartiles."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Spread(quartiles[1], quartiles[0], quartiles[2], min(seconds), max(seconds), len(seconds))


def ratio(a: Sequence[float], b: Sequence[float]) -> Spread:
    """Return a / b of each pair. The runs of a pair follow each other, so that machine drift cancels."""
    return spread([x / y for x, y in zip(a, b, strict=True)])


def shape_of(plan: Plan) -> str:
    """Return the schedule, the micro-batches and the stages of a plan in a few words."""
    stages = [f"{len(stage.ops)} ops on ranks {stage.ranks} in shares {stage.shares}" for stage in plan.stages]
    return f"{plan.schedule}, {len(plan.micro_rows)} micro-batches, {', '.join(stages)}"


def machine() -> dict[str, Any]:
    """Return the machine on which a result was measured."""
    import torch

    model = "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revision": _revision(),
    }


def _revision() -> str:
    """Return the revision of the working tree, or the variable REVISION if the history is not available."""
    if given := os.environ.get("REVISION"):
        return given
    with contextlib.suppress(OSError):
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        return found.stdout.strip() or "unknown"
    return "unknown"


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Let autopart find no times that were measured before, and keep none."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, AUTOPART_CACHE=folder):
        yield


def recorded(name: str, part: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Return a part of a recorded result, empty without one."""
    path = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()).get(part, {}) if path.exists() else {}
    return found


def write(name: str, content: dict[str, Any], *, command: str = "", folder: Path = RESULTS) -> Path:
    """Write a result with its command and machine to results/NAME.json. command: if not the module that runs and its
    arguments.
    """
    folder.mkdir(exist_ok=True)
    started = ".".join(Path(sys.argv[0]).with_suffix("").parts[-3:])
    command = command or " ".join(["python -m", started, *sys.argv[1:]])
    path = folder / f"{name}.json"
    whole = {"command": command, "machine": machine(), **content}
    path.write_text(
        json.dumps(whole, indent=2, default=lambda x: asdict(x) if isinstance(x, Spread) else str(x)) + "\n"
    )
    return path

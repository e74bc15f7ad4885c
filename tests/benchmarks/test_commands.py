"""Every benchmark still starts: with small sizes where that takes a minute or two, else as far as its options."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.shared import hosts, quotas

ROOT = Path(__file__).parents[2]
SMALL = {
    "planning.compare": "",
    "planning.pass_times": "--layers 4 --runs 1",
    "planning.plan_change": "--layers 1 --rounds 1",
    "planning.plan_speed": "--only gpt2-xl",
    "planning.prediction": "--only lstm --rounds 4",
    "planning.promises": "--part names --seeds 0 2",
    "planning.ranks": "--only 1024",
    "planning.splits": "--models lstm --rounds 2",
    "planning.start": "--layers 1",
    "planning.unequal_shares": "--width 128 --rounds 1",
    "planning.wide_layers": "--width 64 --rounds 2 --warmup 1 --dry",
    "papers.terapipe": "",
    "steps.against": "--rounds 2 --warmup 1 --layers 1 --out -",
    "steps.asynchronous": "--rounds 2 --warmup 0 --batches 2 --dry",
    "steps.compiled": "--only gpt2 --rounds 2",
    "steps.evaluation": "--rounds 2",
    "steps.four_ranks": "--rounds 2 --warmup 1 --dry",
    "steps.launches": "--only bert",
    "steps.products": "--rounds 2",
    "steps.replicas": "--rounds 2 --warmup 1 --mbit 1000",
    "steps.schedules": "--rounds 2 --warmup 1",
    "steps.small_micro_batches": "--rounds 2 --warmup 1",
    "steps.step_time": "--rounds 2 --warmup 1",
    "steps.token_slices": "--rounds 2 --warmup 1 --models gpt2 --seqs 1024 --counts 2",
    "steps.two_hosts": "--rates 1000 --rounds 2 --ranks 1",
    "steps.watch_cost": "",
    "training.activation_cache": "--epochs 2",
    "training.checkpoints": "--millions 1 --width 64 --rows 8 --block 2 --rounds 2 --no-record",
    "training.elastic": "--kills 1",
    "training.freed_memory": "--model gpt2",
    "training.large_model": "--layers 2",
    "training.stragglers": "--width 256 --rounds 2",
    "zoo.zoo": "--only bloom --jobs 1",
    "gpu.assumed": "--dry-run",
    "gpu.one_step": "--dry-run",
}
"""The options of a small run."""
WHY_NOT = {
    "steps.two_hosts": hosts.why_not, "planning.unequal_shares": quotas.why_not, "planning.wide_layers": quotas.why_not,
}  # fmt: skip
"""Say why a benchmark cannot run on this machine."""
OPTIONS_ALONE = {
    "papers.experts", "planning.report_pages", "planning.unlike", "papers.pipe_transformer",
    "papers.planner_objectives", "papers.published", "training.freezing", "gpu.half_hour",
}  # fmt: skip
"""What takes minutes at its smallest, a browser, or files from elsewhere."""
IMPORTED = {"planning.peak_memory", "gpu.gpu_tests"}
"""What has no options."""


def test_every_benchmark_stands_in_the_documents_and_is_tried_here() -> None:
    mains = [path for path in (ROOT / "benchmarks").glob("*/*.py") if "\nif __name__ ==" in path.read_text()]
    names = {f"{path.parent.name}.{path.stem}" for path in mains} - {"gpu.__main__"}  # its own test runs it
    assert names == SMALL.keys() | OPTIONS_ALONE | IMPORTED
    documented = set(re.findall(r"-m benchmarks\.(\w+\.\w+)", (ROOT / "docs/benchmarks.md").read_text()))
    assert names - documented == {"gpu.assumed", "gpu.one_step"}  # parts of the half hour
    assert documented <= names


def run(words: list[str], results: Path) -> None:
    """Run Python on these words, with the folder of results."""
    env = {**os.environ, "BENCHMARK_RESULTS": str(results), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_with_small_sizes(name: str, tmp_path: Path) -> None:
    if name in WHY_NOT and (reason := WHY_NOT[name]()):
        pytest.skip(reason)
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "results")  # some keep what others have recorded
    run(["-m", f"benchmarks.{name}", *SMALL[name].split()], tmp_path / "results")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIONS_ALONE | IMPORTED))
def test_a_benchmark_is_imported_and_reads_its_options(name: str, tmp_path: Path) -> None:
    words = ["-c", f"import benchmarks.{name}"] if name in IMPORTED else ["-m", f"benchmarks.{name}", "--help"]
    run(words, tmp_path)

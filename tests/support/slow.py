"""Run the slow tests in parts and write the result of each part to docs/testing.md.

`python tests/support/slow.py` runs every part, `python tests/support/slow.py any-plan state` these.  Each part is a
separate pytest run of less than an hour on two idle cores.  The exit code is 1 if a part has a failure.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"

PARTS = {
    "any-plan": ["e2e/test_any_plan.py"],
    "replicas": [
        "e2e/plans/test_replicas.py",
        "e2e/plans/test_tensor_parallel.py",
        "e2e/asynchronous/test_asynchronous.py",
        "e2e/plans/test_blocking_messages.py",
    ],
    "state": [
        "e2e/plans/test_zero.py",
        "e2e/plans/test_pieces_of_state.py",
        "e2e/plans/test_pieces_that_move.py",
        "e2e/training/test_precision.py",
        "e2e/training/test_master_weights.py",
        "e2e/data/test_batch_statistics.py",
        "e2e/data/test_data.py",
        "e2e/models/test_models_from_meta.py",
        "e2e/failures/test_checkpoints.py",
        "e2e/failures/test_failing_saves.py",
        "e2e/models/test_own_state.py",
        "e2e/plans/test_idle_ranks.py",
        "e2e/data/test_sampler.py",
        "e2e/data/test_position_in_data.py",
        "session",
        "extras/averages",
        "extras/checkpoints",
        "extras/compiled",
        "extras/metrics",
        "extras/sampler",
        "extras/weights",
    ],
    "schedules": ["e2e/plans/test_stages_per_rank.py", "e2e/models/test_peer_cases.py"],
    "sliced-plans": ["e2e/plans/test_slices.py", "passes/tokens"],
    "failures": [
        "e2e/failures/test_faults.py",
        "e2e/failures/test_failures.py",
        "e2e/failures/test_shard_failures.py",
        "e2e/asynchronous/test_asynchronous_failures.py",
        "e2e/training/test_soak.py",
        "runtime",
    ],
    "restarts": [
        "e2e/failures/test_restarted_runs.py",
        "e2e/failures/test_stops.py",
        "e2e/training/test_long_runs.py",
        "e2e/failures/test_elastic.py",
    ],
    "compiled": ["e2e/plans/test_compiled_stages.py"],
    "freezing": [
        "e2e/freezing/test_freezing.py",
        "e2e/freezing/test_frozen_models.py",
        "e2e/freezing/test_kept_activations.py",
        "e2e/freezing/test_changed_between_steps.py",
        "extras/freezing",
        "passes/test_forward_only.py",
    ],
    "constants": ["capture/python/test_values.py", "capture/python/test_silent_constants.py"],
    "scripts": ["e2e/test_random_scripts.py"],
    "rest": [
        "capture/python/test_asking_models.py",
        "capture/trace/test_autocast.py",
        "users/integrations",
        "capture/test_capture.py",
        "capture/trace/test_checkpointing.py",
        "capture/trace/test_grouped_products.py",
        "capture/trace/test_forward_derivatives.py",
        "planning/derive/test_infer_size.py",
        "capture/masks/test_mask_parts.py",
        "capture/masks/test_masks.py",
        "capture/python/test_questions.py",
        "capture/test_rows_axis.py",
        "capture/masks/test_written_masks.py",
        "planning/derive/test_stated.py",
        "e2e/models/test_hidden_coupling.py",
        "planning/costs",
        "files",
        "passes/loss",
        "passes/graph/test_equal_blocks.py",
        "passes/test_pipeline.py",
        "passes/ops",
        "passes/ordering",
        "passes/program/test_mutations.py",
        "passes/program/test_posting_mutations.py",
        "passes/proof",
        "passes/search",
        "e2e/models/test_advice.py",
        "e2e/models/test_exact_or_refused.py",
        "e2e/data/test_kinds_of_batches.py",
        "e2e/data/test_losses.py",
        "e2e/training/test_training.py",
        "users/docs/test_examples.py",
        "users/docs/test_features.py",
        "extras/test_extras.py",
        "users/docs/test_example_scripts.py",
        "users/docs/test_readme.py",
        "planning/test_planning.py",
        "benchmarks",
        "users/cli",
        "users/test_packaging.py",
    ],
}
"""Files and folders of each part, below `tests/`."""


def slow_files() -> set[str]:
    """Return the test files that hold slow tests, relative to `tests/`."""
    tests = ROOT / "tests"
    marks = ("pytest.mark.slow", "import sampled")
    return {
        str(path.relative_to(tests))
        for path in tests.rglob("test_*.py")
        if any(mark in path.read_text() for mark in marks)
    }


def parts_of(file: str) -> list[str]:
    """Return the names of the parts that run this file."""
    return [name for name, places in PARTS.items() if any(file == p or file.startswith(f"{p}/") for p in places)]


def run(part: str) -> tuple[str, bool]:
    """Run one part; return its row of the table, and whether it passed."""
    command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "slow", *(f"tests/{place}" for place in PARTS[part])]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    minutes = (time.monotonic() - began) / 60
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", done.stdout.splitlines()[-1])
    if done.returncode:
        print(done.stdout)
    row = f"| `{part}` | {', '.join(counts) or 'did not finish'} | {minutes:.0f} |"
    print(row, flush=True)
    return row, done.returncode == 0


def write(row: str) -> None:
    """Replace the part's row in the page."""
    name = row.split("|")[1].strip()
    lines = PAGE.read_text().splitlines()
    PAGE.write_text("\n".join(row if line.startswith(f"| {name} ") else line for line in lines) + "\n")


def main(names: list[str]) -> int:
    """Run the named parts, or all of them."""
    passed = True
    for name in names or PARTS:
        row, good = run(name)
        write(row)
        passed &= good
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Everything that one GPU has to settle, in order of worth, each part with its own limit; what is measured is kept.

Each part is a command of its own, which writes its result after every row: a part that fails, hangs or is cut off loses
nothing of the others, and is named at the end with the last lines of its output.

    python -m benchmarks.gpu.half_hour                    about 28 minutes on one GPU; writes results/gpu_*.json
    python -m benchmarks.gpu.half_hour --first 3          the parts from the fourth on
    python -m benchmarks.gpu.half_hour --dry-run          tiny shapes on the CPU, in some minutes; writes to a temporary
                                                          folder
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.common import RESULTS, ROOT

PYTHON = (sys.executable,)


def ranks(count: int) -> tuple[str, ...]:
    """Return the start of a command on several ranks of this machine."""
    return (*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))


@dataclass(frozen=True)
class Part:
    """A command and the seconds it may take.  dry: the command of the dry run, if it is not this one with --dry-run."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    dry: tuple[str, ...] = ()

    def run_as(self, folder: Path, *, dry: bool) -> list[str]:
        """Return the command with the folder of its results."""
        if dry and self.dry:
            return list(self.dry)
        if self.command[-1] == TESTS:
            return [*self.command, str(folder)]
        return [*self.command, "--folder", str(folder), *(["--dry-run"] if dry else [])]


def suite(name: str, *options: str, world: int = 1) -> tuple[str, ...]:
    """Return a command of the benchmark of plans that writes results/gpu_NAME.json."""
    start = PYTHON if world == 1 else ranks(world)
    return (*start, "benchmarks/gpu", "--name", f"gpu_{name}", *options)


ONE = ("--plans", "one device", "ours")
COMPILED = ("--plans", "one device, compiled", "ours, compiled")
SMALL = ("--scale", "0.25", "--models", "gpt2-xl", "llama-1b", "bert-large")
TESTS = "benchmarks.gpu.gpu_tests"
PARTS = (
    Part("what the planner assumes", (*PYTHON, "-m", "benchmarks.gpu.assumed"), 240),
    Part("one device, eager", suite("one", *ONE, "--limit", "120"), 390),
    Part("one device, compiled", suite("one_compiled", *COMPILED, *SMALL, "--limit", "180"), 390),
    Part("what the host does in a step", (*PYTHON, "-m", "benchmarks.gpu.one_step"), 120),
    Part("tests on the device", (*PYTHON, "-m", TESTS), 300,
         (*PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "tests", "--collect-only")),
    Part("two ranks on one device",
         suite("two_ranks", *SMALL, "--transport", "gloo", "--limit", "90", "--plans", "ours", "ours, equal layers",
               "torch 1F1B", "DDP", world=2), 300),
    Part("four ranks on one device",
         suite("four_ranks", "--scale", "0.25", "--models", "gpt2-xl", "--transport", "gloo", "--limit", "90",
               "--plans", "ours", "ours, equal layers", "torch 1F1B", world=4), 180),
)  # fmt: skip


def run(part: Part, folder: Path, *, dry: bool) -> str:
    """Run a part; return "" or why it did not end well, with the last lines of its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            part.run_as(folder, dry=dry), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(part.limit_s * (3 if dry else 1))
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"cut off after {part.limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    print(*lines[-60:], sep="\n", flush=True)
    return "\n".join([why, *lines[-8:]]) if why else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="number of parts to leave out at the beginning")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    given = parser.parse_args()
    failures = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if given.dry_run else given.folder.resolve()
        for part in PARTS[given.first :]:
            began = time.monotonic()
            print(f"== {part.name}", flush=True)
            if why := run(part, folder, dry=given.dry_run):
                failures[part.name] = why
            print(f"== {part.name}: {time.monotonic() - began:.0f} s", flush=True)
        if given.dry_run:
            print("would be written:", *sorted(path.name for path in folder.iterdir()))
    for name, why in failures.items():
        print(f"FAILED {name}: {why}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

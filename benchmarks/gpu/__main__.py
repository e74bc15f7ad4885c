"""Command line of the GPU benchmark: torchrun --nproc-per-node 8 benchmarks/gpu; see docs/benchmarks.md."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # benchmarks import each other by name

from gpu.suite import main  # noqa: E402

if __name__ == "__main__":
    main()

"""Command line of the GPU benchmark: torchrun --nproc-per-node 8 benchmarks/gpu; see docs/benchmarks.md."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # torchrun starts this folder

from benchmarks.gpu.suite import main  # noqa: E402

if __name__ == "__main__":
    main()

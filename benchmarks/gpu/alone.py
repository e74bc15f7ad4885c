"""What the commands for one device share: their options, and a result file that is written after every row."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.common import RESULTS, write

Row = dict[str, Any]
Rows = Callable[[torch.device, int], Iterator[Row]]
"""From the device, the CPU in a dry run, and the number of repeats to the rows of a result."""


def record(name: str, about: str, rows: Rows, repeats: int) -> None:
    """Read the options, and print and write the rows one by one, so that an interrupted run keeps them.

    name: of the command in this folder, and of its file with `gpu_` before.  about: its docstring.  repeats: usual.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --dry-run tries the command on the CPU")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # full single precision
    device, found = torch.device("cpu" if given.dry_run else "cuda"), list[Row]()
    for row in rows(device, 1 if given.dry_run else given.repeats):
        found.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if not given.dry_run:
            content = {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "rows": found}
            write(f"gpu_{name}", content, command=f"python -m benchmarks.gpu.{name}", folder=given.folder)

"""Results of the tests on CUDA devices on this machine.

Runs `pytest -m gpu` and records for each test whether it passed and what it measured: errors of gradients against one
process on the device and on the CPU, measured and predicted peak memory, the version of NCCL.

    python -m benchmarks.gpu.gpu_tests [FOLDER]          a few minutes; writes gpu_tests.json to results/ or FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shared.common import RESULTS, ROOT, write


def devices() -> dict[str, Any]:
    """Return the devices and the versions of CUDA and NCCL."""
    count = torch.cuda.device_count()
    return {
        "devices": [torch.cuda.get_device_name(i) for i in range(count)],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else "",
    }


class Keeper:
    """Writes the results after each test, so that a hanging test does not lose those before it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test."""
        if report.when != "call" and report.passed:
            return
        found: dict[str, Any] = {"test": report.nodeid.split("::")[-1], "outcome": report.outcome}
        found |= {name: value for name, value in report.user_properties}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            found["why"] = getattr(crash, "message", str(report.longrepr))[:600]
        elif report.skipped and isinstance(report.longrepr, tuple):
            found["why"] = report.longrepr[2]
        self._tests.append(found)
        print(*(f"{name}={value}" for name, value in found.items()), flush=True)
        ordered = sorted(self._tests, key=lambda test: str(test["test"]))
        content = {**devices(), "tests": ordered}
        write("gpu_tests", content, command="python -m benchmarks.gpu.gpu_tests", folder=self._folder)


def main() -> int:
    folder = Path(sys.argv[1]).resolve() if sys.argv[1:] else RESULTS
    os.chdir(ROOT)
    call = ["-m", "gpu", "-n", str(min(4, (os.cpu_count() or 1) // 4)), "--dist", "load", "-p", "no:benchmark"]
    return int(pytest.main([*call, "--tb=short", "tests/e2e/test_cuda.py"], plugins=[Keeper(folder)]))


if __name__ == "__main__":
    sys.exit(main())

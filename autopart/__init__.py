"""autopart: a compiler from an unmodified PyTorch model to a planned, running, distributed training pipeline.

    pipe = autopart.compile(model, "cpu:2", sample=batch)
    loss = pipe.step(batch)

See README.md for the first steps and ARCHITECTURE.md for how it works.
"""

from __future__ import annotations

from .api import compile, launch, plan, verify
from .capture.guards import CaptureWarning
from .check import Verification
from .files import load_plan, save_plan
from .ir.cluster import Cluster, Device, Level, Link
from .ir.errors import (
    AutopartError,
    CaptureError,
    PlanError,
    RefusedError,
    RunError,
    UsageError,
)
from .ir.plan import Plan
from .pipe import Pipe

__version__ = "0.1.0"

__all__ = [
    "AutopartError",
    "CaptureError",
    "CaptureWarning",
    "Cluster",
    "Device",
    "Level",
    "Link",
    "Pipe",
    "Plan",
    "PlanError",
    "RefusedError",
    "RunError",
    "UsageError",
    "Verification",
    "compile",
    "launch",
    "load_plan",
    "plan",
    "save_plan",
    "verify",
]

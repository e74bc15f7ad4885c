"""autopart: a compiler from an unmodified PyTorch model to a planned, running, distributed training pipeline.

    pipe = autopart.compile(model, "cpu:2", sample=batch)
    loss = pipe.step(batch)

See README.md for the first steps, docs/ for the rest and ARCHITECTURE.md for how it works.
"""

from __future__ import annotations

from autopart.api import compile, launch, plan, simulate, verify
from autopart.capture.guards import CaptureWarning
from autopart.costs.sources import register_cost_source
from autopart.files.plans import load_plan, save_plan
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.errors import AutopartError, CaptureError, PlanError, RefusedError, RunError, UsageError
from autopart.ir.plan import Plan
from autopart.ir.timeline import Timeline
from autopart.passes.ops.table import register as register_op
from autopart.passes.program.schedules import register as register_schedule
from autopart.report.traces import save_trace
from autopart.session.compare import Verification
from autopart.session.pipe import Pipe

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
    "Timeline",
    "UsageError",
    "Verification",
    "compile",
    "launch",
    "load_plan",
    "plan",
    "register_cost_source",
    "register_op",
    "register_schedule",
    "save_plan",
    "save_trace",
    "simulate",
    "verify",
]

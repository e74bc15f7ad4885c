"""autopart: a compiler from an unmodified PyTorch model to a planned, running, distributed training pipeline.

    pipe = autopart.compile(model, "cpu:2", sample=batch)
    loss = pipe.step(batch)

See README.md for the first steps, docs/ for the rest and ARCHITECTURE.md for how it works.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from autopart.session.state.scaler import NonFiniteWarning

__version__ = "0.1.0"

__all__ = [
    "AutopartError",
    "CaptureError",
    "CaptureWarning",
    "Cluster",
    "Device",
    "Level",
    "Link",
    "NonFiniteWarning",
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

_HOMES = {
    "AutopartError": "autopart.ir.errors:AutopartError",
    "CaptureError": "autopart.ir.errors:CaptureError",
    "CaptureWarning": "autopart.capture.guards:CaptureWarning",
    "Cluster": "autopart.ir.cluster:Cluster",
    "Device": "autopart.ir.cluster:Device",
    "Level": "autopart.ir.cluster:Level",
    "Link": "autopart.ir.cluster:Link",
    "NonFiniteWarning": "autopart.session.state.scaler:NonFiniteWarning",
    "Pipe": "autopart.session.pipe:Pipe",
    "Plan": "autopart.ir.plan:Plan",
    "PlanError": "autopart.ir.errors:PlanError",
    "RefusedError": "autopart.ir.errors:RefusedError",
    "RunError": "autopart.ir.errors:RunError",
    "Timeline": "autopart.ir.timeline:Timeline",
    "UsageError": "autopart.ir.errors:UsageError",
    "Verification": "autopart.session.compare:Verification",
    "compile": "autopart.api:compile",
    "launch": "autopart.api:launch",
    "load_plan": "autopart.files.plans:load_plan",
    "plan": "autopart.api:plan",
    "register_cost_source": "autopart.costs.sources:register_cost_source",
    "register_op": "autopart.passes.ops.table:register",
    "register_schedule": "autopart.passes.program.schedules:register",
    "save_plan": "autopart.files.plans:save_plan",
    "save_trace": "autopart.report.traces:save_trace",
    "simulate": "autopart.api:simulate",
    "verify": "autopart.api:verify",
}
"""Where each public name stands.  It is loaded when it is first asked for: a process that only starts or watches others
does not wait for torch."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name].split(":")
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

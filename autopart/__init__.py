"""autopart: a compiler from an unmodified PyTorch model to a planned, running, distributed training pipeline.

    pipe = autopart.compile(model, "cpu:2", sample=batch)
    loss = pipe.step(batch)

See README.md for the first steps, docs/ for the rest and ARCHITECTURE.md for how it works.
"""

from __future__ import annotations

import difflib
import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopart import freeze
    from autopart.api import compile, launch, plan, simulate, verify
    from autopart.capture.python.guards import CaptureWarning
    from autopart.costs.sources import register_cost_source
    from autopart.extras.averages.averaged_model import AveragedModel
    from autopart.extras.checkpoints.plain import load_into, save_from
    from autopart.extras.metrics.log import MetricsLog
    from autopart.files.checkpoints.folders import latest
    from autopart.files.plans import load_plan, save_plan
    from autopart.ir.cluster import Cluster, Device, Level, Link
    from autopart.ir.errors import (
        AutopartError,
        CaptureError,
        CheckpointError,
        PlanError,
        RefusedError,
        RunError,
        UsageError,
    )
    from autopart.ir.plan import Plan
    from autopart.ir.timeline import Timeline
    from autopart.passes.ops.table import register as register_op
    from autopart.pipe.compare import Verification
    from autopart.pipe.pipe import Pipe
    from autopart.planning.schedule_files import register_schedule, save_schedule
    from autopart.report.traces import save_trace
    from autopart.state.scaler import NonFiniteWarning

__version__ = "0.1.0"

__all__ = [
    "AutopartError",
    "AveragedModel",
    "CaptureError",
    "CaptureWarning",
    "CheckpointError",
    "Cluster",
    "Device",
    "Level",
    "Link",
    "MetricsLog",
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
    "freeze",
    "latest",
    "launch",
    "load_into",
    "load_plan",
    "plan",
    "register_cost_source",
    "register_op",
    "register_schedule",
    "save_from",
    "save_plan",
    "save_schedule",
    "save_trace",
    "simulate",
    "verify",
]

_HOMES = {
    "autopart.api": "compile launch plan simulate verify",
    "autopart.capture.python.guards": "CaptureWarning",
    "autopart.costs.sources": "register_cost_source",
    "autopart.files.checkpoints.folders": "latest",
    "autopart.files.plans": "load_plan save_plan",
    "autopart.ir.cluster": "Cluster Device Level Link",
    "autopart.ir.errors": "AutopartError CaptureError CheckpointError PlanError RefusedError RunError UsageError",
    "autopart.ir.plan": "Plan",
    "autopart.ir.timeline": "Timeline",
    "autopart.passes.ops.table": "register_op",
    "autopart.planning.schedule_files": "register_schedule save_schedule",
    "autopart.report.traces": "save_trace",
    "autopart.extras.averages.averaged_model": "AveragedModel",
    "autopart.extras.checkpoints.plain": "load_into save_from",
    "autopart.pipe.compare": "Verification",
    "autopart.extras.metrics.log": "MetricsLog",
    "autopart.pipe.pipe": "Pipe",
    "autopart.state.scaler": "NonFiniteWarning",
}
"""The public names by module.  A module is loaded at the first use of a name, so that `import autopart` is quick."""
_ALIASES = {"register_op": "register"}
_ROOMS = ("freeze",)
"""Packages whose own names are public."""


def _require_rooms() -> None:
    """Refuse a checkout without links in which nothing was installed: two packages lie outside of this folder."""
    for room in ("passes", "runtime"):
        if not os.path.isdir(os.path.join(__path__[0], room)) and find_spec(f"autopart.{room}") is None:
            raise ImportError(
                f"autopart/{room} should be a link to ../{room}, and this copy of the repository has none (zip files, "
                "some file systems and Windows drop links); install it, which needs no link: pip install -e ."
            )


_require_rooms()


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"autopart.{name}")
    for module, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(module), _ALIASES.get(name, name))
            return value
    near = [] if name.startswith("_") else difflib.get_close_matches(name, __all__, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

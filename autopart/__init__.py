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
    # isort: off
    from autopart import freeze as freeze
    from autopart.api import compile as compile, launch as launch, plan as plan, simulate as simulate, verify as verify
    from autopart.capture.python.guards import CaptureWarning as CaptureWarning
    from autopart.costs.sources import register_cost_source as register_cost_source
    from autopart.extras.averages.averaged_model import AveragedModel as AveragedModel
    from autopart.extras.checkpoints.plain import load_into as load_into, save_from as save_from
    from autopart.extras.metrics.log import MetricsLog as MetricsLog
    from autopart.files.checkpoints.folders import latest as latest
    from autopart.files.plans import load_plan as load_plan, save_plan as save_plan
    from autopart.ir.cluster import Cluster as Cluster, Device as Device, Level as Level, Link as Link
    from autopart.ir.errors import (
        AutopartError as AutopartError,
        CaptureError as CaptureError,
        CheckpointError as CheckpointError,
        PlanError as PlanError,
        RefusedError as RefusedError,
        RunError as RunError,
        UsageError as UsageError,
    )
    from autopart.ir.plan import Plan as Plan
    from autopart.ir.timeline import Timeline as Timeline
    from autopart.passes.ops.table import register
    from autopart.pipe.compare import Verification as Verification
    from autopart.pipe.pipe import Pipe as Pipe
    from autopart.planning.schedule_files import register_schedule as register_schedule, save_schedule as save_schedule
    from autopart.report.traces import save_trace as save_trace
    from autopart.state.scaler import NonFiniteWarning as NonFiniteWarning

    register_op = register

__version__ = "0.1.0"

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
__all__ = sorted([*_ROOMS, *" ".join(_HOMES.values()).split()])


for _room in ("passes", "runtime"):  # outside of this folder: a checkout without links has to be installed
    if not os.path.isdir(os.path.join(__path__[0], _room)) and find_spec(f"autopart.{_room}") is None:
        raise ImportError(
            f"autopart/{_room} should be a link to ../{_room}, and this copy of the repository has none (zip files, "
            "some file systems and Windows drop links); install it, which needs no link: pip install -e ."
        )


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

"""The rows by which extras enter: lists of the core, the parts of a pipe, and what users call of them.

Nothing else of the core or of this room imports an extra.  An extra is deleted with its folder and its lines here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from autopart.costs.sources import register_cost_source
from autopart.extras.asynchronous.part import Asynchronous
from autopart.extras.checkpoints.part import Checkpoints
from autopart.extras.compiled.compiled_costs import compiled_costs
from autopart.extras.compiled.inductor import Inductor
from autopart.extras.elastic.speeds import Speeds
from autopart.extras.freezing.kept.activations import Activations
from autopart.extras.freezing.part import Replanning
from autopart.extras.metrics.metrics import Measurements
from autopart.extras.sampler.sampler import DataPosition
from autopart.extras.weights.source import weights_for
from autopart.ir.errors import short_errors
from autopart.session.lists import BATCH_STEPS, WEIGHTS
from autopart.stagecode.compilers import COMPILERS
from autopart.state.core import Core, Part

A = ParamSpec("A")
P = TypeVar("P", bound=Part)
R = TypeVar("R")

COMPILERS["inductor"] = Inductor
register_cost_source("compiled", compiled_costs)
WEIGHTS.append(weights_for)
BATCH_STEPS.append(Activations)

EXTRAS: Sequence[type[Part]] = (
    Checkpoints,
    Measurements,
    DataPosition,
    Speeds,
    Asynchronous,
    Replanning,
)
"""The parts that extras add to each pipe, in the order in which they follow what happens."""


def verb(part: type[P], method: Callable[Concatenate[P, A], R]) -> Callable[Concatenate[Any, A], R]:
    """Return a method of the pipe that calls one of its part, with the same name, types and documentation; where that
    returns the part, it returns the pipe."""

    @functools.wraps(method)
    def call(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        mine = pipe._core.part(part)
        found = method(mine, *args, **kwargs)
        return pipe if found is mine else found

    found: Any = short_errors(call)
    return found  # type: ignore[no-any-return]


class OfExtras:
    """What users call of the extras on a pipe."""

    _core: Core

    save = verb(Checkpoints, Checkpoints.save)
    load = verb(Checkpoints, Checkpoints.load)

    metrics = verb(Measurements, Measurements.metrics)
    report = verb(Measurements, Measurements.report)

    sampler = verb(DataPosition, DataPosition.sampler)

    @property
    @short_errors
    def stragglers(self) -> Mapping[int, float]:
        """Ranks whose computes take at least twice as long as planned, compared with the other ranks, or 1.5 times as
        long as in their first steps under the plan, and how many times as long.

        A rank is named by the median of its last eight steps, its slowness is that of the newest five.  Ranks that have
        become so much faster since the last `replan`, which judges them all, are named too.  Alike on all ranks, and a
        warning names them.  Measured in `step` on CPUs."""
        return self._core.part(Speeds).stragglers()

    train = verb(Asynchronous, Asynchronous.train)
    flush = verb(Asynchronous, Asynchronous.flush)

    adopt = verb(Replanning, Replanning.adopt)
    replan = verb(Replanning, Replanning.replan)

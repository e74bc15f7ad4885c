"""The rows by which extras enter: lists of the core, the parts of a pipe, and what users call of them.

Nothing else of the core or of this room imports an extra.  An extra is deleted with its folder and its lines here.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from autopart.pipe.forward import fact, verb
from autopart.session.lists import BATCH_STEPS, WEIGHTS
from autopart.stagecode.compilers import COMPILERS
from autopart.state.core import Core, Part

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


class OfExtras:
    """What users call of the extras on a pipe."""

    _core: Core

    save = verb(Checkpoints, Checkpoints.save)
    load = verb(Checkpoints, Checkpoints.load)

    metrics = verb(Measurements, Measurements.metrics)
    report = verb(Measurements, Measurements.report)

    sampler = verb(DataPosition, DataPosition.sampler)

    stragglers = fact(Speeds, Speeds.stragglers)

    train = verb(Asynchronous, Asynchronous.train)
    flush = verb(Asynchronous, Asynchronous.flush)

    adopt = verb(Replanning, Replanning.adopt)
    replan = verb(Replanning, Replanning.replan)

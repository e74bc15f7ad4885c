"""The rows by which extras enter the lists of the core, made when the pipe is imported."""

from __future__ import annotations

from autopart.costs.sources import register_cost_source
from autopart.extras.compiled.compiled_costs import compiled_costs
from autopart.extras.compiled.inductor import Inductor
from autopart.extras.freezing.kept.activations import Activations
from autopart.extras.weights.source import weights_for
from autopart.session.lists import BATCH_STEPS, WEIGHTS
from autopart.stagecode.compilers import COMPILERS

COMPILERS["inductor"] = Inductor
register_cost_source("compiled", compiled_costs)
WEIGHTS.append(weights_for)
BATCH_STEPS.append(Activations)

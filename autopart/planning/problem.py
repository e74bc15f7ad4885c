"""What is planned: a model's programs at several sizes, the ways to cut its batch, and what was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.capture.derive.family import ProgramFamily
from autopart.capture.derive.token_axis import WHOLE_SEQUENCES, AskedSlices
from autopart.ir.cluster import Cluster
from autopart.options import Options
from autopart.planning.splits import Splits


@dataclass(frozen=True)
class Problem:
    """What to plan.

    family: its base is the program whose costs are taken.  splits: the ways to cut the batch to choose from.
    to_run: only what is exact.  notes: what the plan says about restrictions.  least_rows: of a micro-batch, for a
    replica that has any.  uncut: values that must not pass between stages.
    """

    family: ProgramFamily
    splits: Splits
    cluster: Cluster
    options: Options
    to_run: bool
    notes: tuple[str, ...] = ()
    slices: AskedSlices = WHOLE_SEQUENCES
    least_rows: int = 1
    uncut: tuple[str, ...] = ()

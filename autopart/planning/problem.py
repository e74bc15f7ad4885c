"""What is planned: a model's programs at several sizes, the ways to cut its batch, and what was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.capture.family import ProgramFamily
from autopart.capture.splits import Splits
from autopart.capture.token_axis import WHOLE_SEQUENCES, AskedSlices
from autopart.ir.capabilities import Capabilities
from autopart.ir.cluster import Cluster
from autopart.options import Options


@dataclass(frozen=True)
class Problem:
    """What to plan.  family: its base is the program whose costs are taken; splits: to choose from; least_rows: that a
    replica has of a micro-batch, where it has any; uncut: values that must not pass between stages; notes: what to say
    about that choice."""

    family: ProgramFamily
    splits: Splits
    cluster: Cluster
    options: Options
    abilities: Capabilities
    notes: tuple[str, ...] = ()
    slices: AskedSlices = WHOLE_SEQUENCES
    least_rows: int = 1
    uncut: tuple[str, ...] = ()

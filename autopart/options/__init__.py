"""The one list of options of `compile`, `plan`, `verify` and the command line.

`table.Options` is the list.  A row has the name, type and default of an option, and (`row.Option`) what it means, its
possible values, how they are read, and whether a plan decides it.  Docstrings, checks and flags come from the rows;
`OptionsDict` repeats the names with the types that a caller may pass, for editors and type checkers, and a test
compares the two.

May enter: what an option is, and how its value is read; another file says what else callers may have meant.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

import torch

from autopart.capture.trace.export import LossFn
from autopart.costs.sources import CostSource
from autopart.ir.errors import UsageError
from autopart.ir.plan import Precision
from autopart.ir.shares import Policy
from autopart.options.other_names import unknown
from autopart.options.row import Option
from autopart.options.table import Options, PlanLike
from autopart.passes.program.orders import Order, Schedule
from autopart.passes.search.space import Watch

__all__ = ["OPTIONS", "OptimizerLike", "Options", "OptionsDict", "PlanLike", "read_options"]

OptimizerLike = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


class OptionsDict(TypedDict, total=False):
    """The options as keyword arguments of `compile`, `plan` and `verify`."""

    loss_fn: LossFn | None
    stages: Literal["auto"] | int | None
    micro_batches: Literal["auto"] | int | None
    replicas: Literal["auto"] | int | Sequence[int] | None
    precision: Precision | torch.dtype | str | None
    optimizer: OptimizerLike | None
    schedule: str | Order | Schedule | None
    stages_per_rank: Literal["auto"] | int | None
    cuts: str | Iterable[str] | None
    together: str | Iterable[str | Iterable[str]] | None
    pins: Mapping[str, int] | None
    token_slices: Literal["auto"] | int | Iterable[int] | None
    recompute: Literal["auto", "off", "all"] | Sequence[str] | None
    zero: Literal["auto", 0, 1] | None
    master_weights: bool
    replica_policy: Policy | None
    sync_batchnorm: bool
    bucket_bytes: int | str | None
    plan: PlanLike | None
    costs: str | CostSource | None
    prove: float
    cache: bool
    watch: Watch | None
    rows_axis: Mapping[str, int | None] | None
    loss_reduction: Literal["auto", "mean", "sum", "token-mean"] | None
    non_finite: Literal["auto", "skip", "raise"] | None
    seed: int
    timeout: float | None
    transport: Literal["auto", "nccl", "gloo"] | None
    backend: Literal["eager", "inductor"] | None
    weights: str | os.PathLike[str] | None


OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}
"""The rows by name, in groups: a row that names one begins it."""
_DEFAULTS = Options()


def _documentation() -> str:
    """Return the names and meanings of all options, by group."""
    lines = []
    for name, row in OPTIONS.items():
        lines += ["", f"{row.group}:"] if row.group else []
        lines += textwrap.wrap(f"    {name:<15} {row.text}", 119, subsequent_indent=" " * 20, break_on_hyphens=False)
    return "\n".join(lines)


Options.__doc__ = f"{Options.__doc__}\n{_documentation()}"

# ---- reading ---------------------------------------------------------------------------------------------------------


def read_options(**given: Any) -> Options:
    """Read keyword arguments; None stands for the default.

    Raises UsageError for an unknown name, an impossible value, and an option that plan= decides.
    """
    for name in given:
        if name not in OPTIONS:
            raise unknown(name, list(OPTIONS))
    found = {name: (OPTIONS[name].values, value) for name, value in given.items()}
    options = Options(
        **{name: values.read(name, value) for name, (values, value) in found.items() if not values.leaves_open(value)}
    )
    if options.plan is not None:
        for name, row in OPTIONS.items():
            if row.planned and getattr(options, name) != getattr(_DEFAULTS, name):
                raise UsageError(f"both plan= and {name}= are given", why="the plan decides it", fix=f"drop {name}=")
    return options

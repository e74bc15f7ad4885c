"""The keywords of `compile` and `plan`, validated before any work."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .capture.export import LossFn
from .ir.errors import UsageError
from .ir.plan import SCHEDULES, Plan

REDUCTIONS = ("auto", "mean", "sum", "token-mean")
COSTS = ("auto", "measured", "analytic")


@dataclass(frozen=True)
class Options:
    """Validated options; None means that the planner chooses."""

    loss_fn: LossFn | None = None
    loss_reduction: str = "auto"
    stages: int | None = None
    micro_batches: int | None = None
    schedule: str = "auto"
    cuts: tuple[str, ...] = ()
    plan: Plan | str | os.PathLike[str] | None = None
    seed: int = 0
    costs: str = "auto"


def read_options(**given: Any) -> Options:
    """Options from keywords; raises UsageError for an unknown or impossible value, naming the known ones."""
    unknown = set(given) - set(Options.__dataclass_fields__)
    if unknown:
        raise UsageError(
            f"unknown option {sorted(unknown)[0]!r}",
            fix="options are: sample, " + ", ".join(Options.__dataclass_fields__),
        )
    options = Options(**{**given, "cuts": _cuts(given.get("cuts", ()))})
    _one_of("schedule", options.schedule, ("auto", *SCHEDULES))
    _one_of("loss_reduction", options.loss_reduction, REDUCTIONS)
    _one_of("costs", options.costs, COSTS)
    _count("stages", options.stages)
    _count("micro_batches", options.micro_batches)
    if not isinstance(options.seed, int):
        raise UsageError(f"seed is {options.seed!r}", fix="use an integer")
    if options.loss_fn is not None and not callable(options.loss_fn):
        raise UsageError(f"loss_fn is a {type(options.loss_fn).__name__}", fix="pass loss_fn(output, target) -> scalar")
    if options.plan is not None:
        _no_conflict(options)
    return options


def _cuts(cuts: Iterable[str] | str | None) -> tuple[str, ...]:
    if not isinstance(cuts, str | Iterable | None):
        raise UsageError(f"cuts is a {type(cuts).__name__}", fix='for example cuts=["transformer.h.4"]')
    found = (cuts,) if isinstance(cuts, str) else tuple(cuts or ())
    for cut in found:
        if not isinstance(cut, str) or not cut:
            raise UsageError(f"cut {cut!r} is not a module path", fix='for example cuts=["transformer.h.4"]')
    return found


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"unknown {name} {value!r}", fix=f"use one of {', '.join(known)}")


def _count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UsageError(f"{name} is {value!r}", fix="use an integer of at least 1, or None to let the planner choose")


def _no_conflict(options: Options) -> None:
    for name in ("stages", "micro_batches", "cuts", "schedule"):
        if getattr(options, name) not in (None, (), "auto"):
            raise UsageError(f"both plan= and {name}= are given", why="a plan fixes that already", fix=f"drop {name}=")

"""What may be asked of `compile`, `plan`, `simulate` and `verify`: a record, validated before any work."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autopart.capture.export import LossFn
from autopart.costs.sources import COST_SOURCES, CostSource
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan, Precision
from autopart.ir.program import MAX_BUCKET_BYTES
from autopart.ir.shares import POLICIES, Policy
from autopart.passes.program.schedules import Order, Schedule, names, register
from autopart.passes.search.space import Watch
from autopart.runtime.world import transports

LOSS_REDUCTIONS = ("auto", "mean", "sum", "token-mean")
RECOMPUTE = ("auto", "off", "all")
PRECISIONS = ("fp32", "bf16", "fp16")
ZERO = ("auto", 0, 1)
COMPRESS = ("bf16",)
NON_FINITE = ("auto", "skip", "raise")


@dataclass(frozen=True, slots=True)
class Options:
    """Options; None, empty or "auto" leaves the choice to the planner.

    loss_fn         loss_fn(output, target) -> scalar, where the model returns no loss
    loss_reduction  how the losses of rows combine, if you want that checked: "auto", "mean", "sum", "token-mean"
    stages          number of stages
    micro_batches   number of micro-batches
    schedule        "auto", "1f1b", "1f1b-deep", "gpipe", or a function of your own: (stages, micro-batches) to the
                    computes of each worker in order; "pipedream" in `plan` alone, and never chosen unasked
    cuts            module paths at which a stage begins
    together        module paths, or groups of them, between whose first and last op no stage begins
    pins            {module path: number of the stage that runs it}
    replicas        devices of every stage, or a number for each stage
    replica_policy  "split": each replica has its share of the rows of every micro-batch; "turn": whole micro-batches,
                    one after the other; None lets them split
    token_slices    None: sequences are whole; a number of slices, or their lengths: sequences are cut into these, and
                    stages work on different slices at once (TeraPipe), exact for causal models, refused for others;
                    "auto": where that makes the simulated step shorter, and the model can be cut
    recompute       "auto" (what the model checkpoints, and as much as the memory demands), "off", "all", or patterns
                    of module paths: these modules and nothing else
    precision       "fp32" (the model as it is), "bf16" or "fp16" (as under torch.autocast of the cluster's devices);
                    None is that of plan=, else "fp32"
    sync_batchnorm  True: the replicas of a stage take batch statistics of the whole micro-batch together; False: each
                    of its own rows, as in DistributedDataParallel
    zero            1: the replicas of a stage share the optimizer's state among them (ZeRO-1); 0: each has all of it;
                    "auto": where that is faster, or memory does not suffice otherwise
    master_weights  True: parameters in bf16 or fp16 have masters in fp32, which `Pipe.parameters` yields, and the
                    model gets their values, rounded, before every run
    bucket_bytes    gradients that replicas of a stage sum together; None for 25 MiB
    compress        "bf16": gradients are rounded to that for sums over replicas, which sends half the bytes and is not
                    exact; None sums them as wide as they are
    non_finite      what a step does whose gradients are not all finite, on any rank: "skip" leaves gradients as they
                    were (`Pipe.skipped`), "raise" raises NonFiniteError; "auto" skips in fp16, and does not look else
    optimizer       whose state the memory has to hold: an optimizer class, a function of the parameters, an
                    optimizer, or "sgd", "momentum", "adam", "adamw", each also with "+masters"; None charges Adam,
                    and the plan says so
    costs           times of ops: "auto", "measured" on this machine, "analytic" from operations and bytes, or a
                    function of your own (`autopart.costs.sources.CostSource`)
    prove           seconds that CP-SAT may take to bound the step of the chosen stages; 0 for no such proof
    cache           False plans anew instead of reading the plan that answered the same question before
    watch           watch(what is done, best step so far in ns or 0, lower bound in ns or 0), called while searching
    plan            a Plan or the path of a plan file, instead of the options that it settles
    seed            of dropout
    timeout         seconds that a rank waits for others that do not go on before that is an error which names them;
                    planning and capturing do not count; None for AUTOPART_TIMEOUT_S or 600.  Ranks that died or were
                    stopped are named within seconds all the same
    transport       what carries messages: "nccl" (one CUDA device for each rank) or "gloo" (CPUs, and CUDA devices
                    that ranks may share, through memory of the host); "auto" takes NCCL for CUDA devices
    """

    loss_fn: LossFn | None = None
    loss_reduction: str = "auto"
    stages: int | None = None
    micro_batches: int | None = None
    schedule: str = "auto"
    cuts: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict)
    replicas: int | tuple[int, ...] | None = None
    replica_policy: Policy | None = None
    token_slices: str | int | tuple[int, ...] | None = None
    recompute: str | tuple[str, ...] = "auto"
    precision: Precision | None = None
    sync_batchnorm: bool = False
    zero: int | str = "auto"
    master_weights: bool = False
    bucket_bytes: int | None = None
    compress: Literal["bf16"] | None = None
    non_finite: str = "auto"
    optimizer: Any = None
    costs: str | CostSource = "auto"
    prove: float = 0.0
    cache: bool = True
    watch: Watch | None = None
    plan: Plan | str | os.PathLike[str] | None = None
    seed: int = 0
    timeout: float | None = None
    transport: str = "auto"


def read_options(**given: Any) -> Options:
    """The record of what was given, in one form: raises UsageError for an impossible value, naming the possible ones,
    and TypeError for a name that is not an option's."""
    read = {
        "cuts": _paths("cut", given.get("cuts", ())),
        "together": _groups(given.get("together", ())),
        "pins": _pins(given.get("pins")),
        "replicas": _replicas(given.get("replicas")),
        "schedule": _schedule(given.get("schedule", "auto")),
        "recompute": _recompute(given.get("recompute", "auto")),
        "token_slices": _token_slices(given.get("token_slices")),
    }
    options = Options(**{**given, **read})
    _one_of("non_finite", options.non_finite, NON_FINITE)
    if options.replica_policy is not None:
        _one_of("replica_policy", options.replica_policy, POLICIES)
    if options.precision is not None:
        _one_of("precision", options.precision, PRECISIONS)
    if options.compress is not None:
        _one_of("compress", options.compress, COMPRESS)
    if options.zero not in ZERO or isinstance(options.zero, bool):
        raise UsageError(f"zero is {options.zero!r}", fix='use 0, 1 or "auto"')
    _one_of("loss_reduction", options.loss_reduction, LOSS_REDUCTIONS)
    _one_of("transport", options.transport, transports())
    _cost_source(options.costs)
    _count("stages", options.stages)
    _count("micro_batches", options.micro_batches)
    _count("bucket_bytes", options.bucket_bytes)
    if (options.bucket_bytes or 0) > MAX_BUCKET_BYTES:
        raise UsageError(f"bucket_bytes is {options.bucket_bytes}", fix=f"use at most {MAX_BUCKET_BYTES}")
    if not isinstance(options.seed, int):
        raise UsageError(f"seed is {options.seed!r}", fix="use an integer")
    for name in ("cache", "sync_batchnorm", "master_weights"):
        if not isinstance(getattr(options, name), bool):
            raise UsageError(f"{name} is {getattr(options, name)!r}", fix="use True or False")
    _seconds("prove", options.prove)
    if options.timeout is not None:
        check_timeout(options.timeout)
    if options.loss_fn is not None and not callable(options.loss_fn):
        raise UsageError(f"loss_fn is a {type(options.loss_fn).__name__}", fix="pass loss_fn(output, target) -> scalar")
    if options.plan is not None:
        _no_conflict(options)
    return options


def _schedule(schedule: str | Order | Schedule) -> str:
    """The name of a schedule; one that is given itself is registered under its own."""
    if callable(schedule) or isinstance(schedule, Schedule):
        return register(schedule).name
    _one_of("schedule", schedule, ("auto", *names()))
    return schedule


def _paths(what: str, paths: Iterable[str] | str | None) -> tuple[str, ...]:
    if not isinstance(paths, str | Iterable | None):
        raise UsageError(f"{what}s is a {type(paths).__name__}", fix=f'for example {what}s=["transformer.h.4"]')
    found = (paths,) if isinstance(paths, str) else tuple(paths or ())
    for path in found:
        if not isinstance(path, str) or not path:
            raise UsageError(f"{what} {path!r} is not a module path", fix=f'for example {what}s=["transformer.h.4"]')
    return found


def _recompute(recompute: Any) -> str | tuple[str, ...]:
    """One of the words, or patterns of module paths."""
    if isinstance(recompute, str) and recompute in RECOMPUTE:
        return recompute
    found = tuple(recompute) if isinstance(recompute, Iterable) and not isinstance(recompute, str) else ()
    if not found or not all(isinstance(pattern, str) and pattern for pattern in found):
        known = ", ".join(RECOMPUTE)
        raise UsageError(
            f"unknown recompute {recompute!r}",
            fix=f'use one of {known}, or a list of patterns of module paths: recompute=["model.layers.*"]',
        )
    return found


def _groups(groups: Any) -> tuple[tuple[str, ...], ...]:
    """Each group of modules that no cut may part; a single path is a group of its own."""
    if not isinstance(groups, str | Iterable | None):
        raise UsageError(f"together is a {type(groups).__name__}", fix='for example together=["encoder", ("a", "b")]')
    return tuple(_paths("path", group) for group in ((groups,) if isinstance(groups, str) else groups or ()))


def _pins(pins: Any) -> Mapping[str, int]:
    if pins is None:
        return {}
    good = isinstance(pins, Mapping) and all(isinstance(p, str) and type(s) is int for p, s in pins.items())
    if not good:
        raise UsageError(f"pins is {pins!r}", fix='map module paths to stages: pins={"lm_head": 3}')
    return dict(pins)


def _replicas(replicas: Any) -> int | tuple[int, ...] | None:
    if replicas is None:
        return None
    counts = tuple(replicas) if isinstance(replicas, Iterable) and not isinstance(replicas, str) else (replicas,)
    if not counts or not all(type(c) is int and c > 0 for c in counts):
        raise UsageError(f"replicas is {replicas!r}", fix="use a number, or one for each stage: replicas=(2, 1)")
    return replicas if isinstance(replicas, int) else counts


def _token_slices(slices: Any) -> str | int | tuple[int, ...] | None:
    if slices is None or slices == "auto":
        return slices  # type: ignore[no-any-return]
    lengths = tuple(slices) if isinstance(slices, Iterable) and not isinstance(slices, str) else (slices,)
    if not lengths or not all(type(length) is int and length > 0 for length in lengths):
        raise UsageError(
            f"token_slices is {slices!r}",
            fix='use None, "auto", a number of slices, or their lengths: token_slices=(512, 512, 256)',
        )
    return slices if isinstance(slices, int) else lengths


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"unknown {name} {value!r}", fix=f"use one of {', '.join(known)}")


def _cost_source(costs: object) -> None:
    if isinstance(costs, str):
        _one_of("costs", costs, tuple(COST_SOURCES))
    elif not callable(costs):
        known = ", ".join(COST_SOURCES)
        raise UsageError(
            f"costs is a {type(costs).__name__}", fix=f"use one of {known}, or a function (captured, device) -> costs"
        )


def _count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UsageError(f"{name} is {value!r}", fix="use an integer of at least 1, or None to let the planner choose")


def _seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{name} is {value!r}", fix=f"use a number of seconds, for example {name}=10")


def check_timeout(value: object) -> None:
    """Raises UsageError for what is no time limit: a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(
            f"timeout is {value!r}", fix="use a number of seconds above 0, for example timeout=600, or None"
        )


def _no_conflict(options: Options) -> None:
    settled = (
        "stages",
        "micro_batches",
        "cuts",
        "schedule",
        "replicas",
        "replica_policy",
        "recompute",
        "token_slices",
        "zero",
        "bucket_bytes",
        "compress",
        "together",
        "pins",
        "prove",
    )
    for name in settled:
        if getattr(options, name) not in (None, (), "auto", {}, 0.0):
            raise UsageError(f"both plan= and {name}= are given", why="a plan fixes that already", fix=f"drop {name}=")

"""The one list of options of `compile`, `plan`, `verify` and the command line.

`Options` is the list: what each option means, in groups, its type and its default; `_CHECKS` has the possible values.
`OptionsDict` repeats the names with the types that a caller may pass, for editors and type checkers.  The docstrings of
`autopart.api` and the flags of the command line are generated from this list.

May enter: what an option is, and how its value is read; another file says what else callers may have meant.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from autopart.capture.trace.export import LossFn
from autopart.costs.sources import COST_SOURCES, CostSource
from autopart.files.schedule_csv import read_schedule_csv
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan, Precision
from autopart.ir.program import MAX_BUCKET_BYTES
from autopart.ir.shares import POLICIES, Policy
from autopart.options.other_names import unknown
from autopart.passes.program.given import given_schedule
from autopart.passes.program.orders import Order, Schedule
from autopart.passes.program.schedules import names, register
from autopart.passes.search.space import PER_RANK, Watch
from autopart.runtime.group.world import transports

OptimizerLike = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
PlanLike = Plan | str | os.PathLike[str]


class OptionsDict(TypedDict, total=False):
    """The options as keyword arguments of `compile`, `plan` and `verify`."""

    loss_fn: LossFn | None
    stages: int | None
    micro_batches: int | None
    replicas: int | Sequence[int] | None
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


@dataclass(frozen=True, slots=True)
class Options:
    """Options.  The planner decides what you leave out, or pass as None, unless a default is named.

    The options that matter first:
        loss_fn         loss_fn(output, target) -> scalar, for a model that does not return its loss
        stages          number of pipeline stages
        micro_batches   number of micro-batches of a step
        replicas        devices that run each stage on different rows: one number, or one for each stage, (8, 8, 4)
        precision       "fp32" runs the model as it is, "bf16" and "fp16" run it as under torch.autocast; default:
                        the precision of plan=, else "fp32"
        optimizer       optimizer whose state is charged to memory: a class, a function of the parameters, an
                        optimizer, or "sgd", "momentum", "adam", "adamw", each also with "+masters"; default: Adam

    Cuts and schedule:
        schedule        order of forwards and backwards: "auto", "1f1b", "1f1b-deep" (a longer warm-up: a shorter step
                        for more activation memory), "gpipe"; with split backwards "zb-h1", "zb-h2"; with several stages
                        a rank "interleaved", "zb-v"; "searched" for this plan; asynchronous "pipedream" and
                        "pipedream-2bw" (`Pipe.train`); or a function of your own, (stages, micro-batches) -> computes
                        of each stage in order
        stages_per_rank number of stages that each rank runs; "auto" tries 1, 2, 4 and 8 if stages= and cuts= allow
                        it; stages= counts the stages of all ranks
        cuts            module paths at which a stage begins
        together        module paths, or groups of them, inside which no stage begins
        pins            stage that runs a module: {module path: number of the stage}
        token_slices    cut the sequences of a causal model into slices that run on different stages at once
                        (TeraPipe): a number of slices, or their lengths; "auto" slices if that shortens the step; by
                        default sequences stay whole

    Memory:
        recompute       activation checkpointing: "auto" (what the model checkpoints, and more when memory would not
                        suffice), "off", "all", or patterns of module paths: these modules and nothing else
        zero            share the optimizer's state among the replicas of a stage (ZeRO-1): 1, 0, or "auto" (if that
                        shortens the step, or memory would otherwise not suffice)
        master_weights  keep fp32 master weights of bf16 and fp16 parameters: `Pipe.parameters` yields the masters, and
                        the model gets their rounded values before every run

    Replicas:
        replica_policy  "split" gives each replica a share of the rows of every micro-batch, "turn" gives replicas
                        whole micro-batches, round robin; default: "split"
        sync_batchnorm  take batch statistics over the whole micro-batch, not over each replica's own rows
        bucket_bytes    size of the buckets in which replicas sum gradients: bytes, or "4MiB"; default: 25 MiB

    Search:
        plan            a Plan or the path of a plan file, instead of the options that it decides
        costs           times of ops: "measured" on this machine, "analytic" from FLOPs and bytes, "auto" (measured
                        if the device is present and the model has weights), "compiled" (measured in compiled code,
                        the default with backend="inductor"), or a function of your own
        prove           seconds for CP-SAT to bound the step of the chosen stages; 0 for none
        cache           reuse the plan that answered the same question before; False searches again
        watch           watch(phase, best step in ns or 0, lower bound in ns or 0), called during the search

    Running:
        rows_axis       axis on which inputs have rows, None for an input without: {"positions": 1, "weights": None};
                        of others, those whose axis 0 has as many entries as most others' are taken to have rows there
        loss_reduction  how the losses of rows combine: "auto" derives it; "mean", "sum", "token-mean" are checked
        non_finite      what a step does when a gradient is infinite or NaN on any rank: "skip" adds nothing and sets
                        `Pipe.skipped`, "raise" raises NonFiniteError, "auto" skips in fp16 and otherwise does not check
        seed            seed of dropout, and of weights="init"
        timeout         seconds that a rank waits for another one before it fails and names that rank; capture and
                        planning do not count; default: AUTOPART_TIMEOUT_S, else 600
        transport       what carries messages: "nccl" (a CUDA device for each rank), "gloo" (CPUs, and CUDA devices
                        that ranks may share), "auto" (NCCL for CUDA devices)
        backend         what runs the ops of a stage: "eager"; "inductor", which compiles them (needs a C++ compiler
                        for CPUs, Triton for CUDA; what cannot be compiled runs eagerly, with a warning)
        weights         values of a model that was built on the meta device, of which each rank makes its own part:
                        a safetensors file, a folder of them, or a checkpoint; "init" runs the model's own
                        initialisation with seed=
    """

    loss_fn: LossFn | None = None
    stages: int | None = None
    micro_batches: int | None = None
    replicas: int | tuple[int, ...] | None = None
    precision: Precision | None = None
    optimizer: Any = None
    schedule: str = "auto"
    stages_per_rank: int | str = "auto"
    cuts: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    pins: Mapping[str, int] = field(default_factory=dict)
    token_slices: str | int | tuple[int, ...] | None = None
    recompute: str | tuple[str, ...] = "auto"
    zero: int | str = "auto"
    master_weights: bool = False
    replica_policy: Policy | None = None
    sync_batchnorm: bool = False
    bucket_bytes: int | None = None
    plan: PlanLike | None = None
    costs: str | CostSource = "auto"
    prove: float = 0.0
    cache: bool = True
    watch: Watch | None = None
    rows_axis: Mapping[str, int | None] = field(default_factory=dict)
    loss_reduction: str = "auto"
    non_finite: str = "auto"
    seed: int = 0
    timeout: float | None = None
    transport: str = "auto"
    backend: str = "eager"
    weights: str | None = None


# ---- values ----------------------------------------------------------------------------------------------------------


def choices(name: str) -> tuple[str, ...]:
    """Return the words that an option takes; () for an option without words."""
    known: dict[str, Iterable[str]] = {
        "precision": _PRECISIONS,
        "schedule": ("auto", *names()),
        "recompute": ("auto", "off", "all"),
        "zero": ("auto", "0", "1"),
        "replica_policy": POLICIES,
        "costs": COST_SOURCES,
        "loss_reduction": ("auto", "mean", "sum", "token-mean"),
        "non_finite": ("auto", "skip", "raise"),
        "transport": transports(),
        "backend": ("eager", "inductor"),
    }
    return tuple(known.get(name, ()))


_PRECISIONS = {
    "fp32": ("float32", "32", "32-true", torch.float32),
    "bf16": ("bfloat16", "bf16-mixed", torch.bfloat16),
    "fp16": ("float16", "half", "16-mixed", "fp16-mixed", torch.float16),
}
"""The other names that torch and other libraries give to each precision."""


def _precision(value: Any) -> Any:
    return next((name for name, others in _PRECISIONS.items() if value in others), value)


def _weights(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _schedule(value: Any) -> Any:
    if isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".csv"):
        value = given_schedule(Path(value).stem, read_schedule_csv(value))
    return register(value).name if callable(value) or isinstance(value, Schedule) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _paths(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value)


def _groups(value: Any) -> Any:
    groups = _paths(value)
    return tuple(map(_paths, groups)) if isinstance(groups, tuple) else groups


def _recompute(value: Any) -> Any:
    found = _tuple(value)
    return found[0] if isinstance(found, tuple) and found[:1] in [(word,) for word in choices("recompute")] else found


def _bytes(value: Any) -> Any:
    try:
        return int(_BYTES.validate_python(value)) if isinstance(value, str) else value
    except ValidationError:
        return value


_BYTES = TypeAdapter(ByteSize)
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "precision": _precision,
    "schedule": _schedule,
    "replicas": _tuple,
    "token_slices": _tuple,
    "cuts": _paths,
    "together": _groups,
    "recompute": _recompute,
    "bucket_bytes": _bytes,
    "weights": _weights,
}
"""How a value is brought to the form of `Options`; a value that cannot be is left to the check."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_axis(value: Any) -> bool:
    return value is None or type(value) is int


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_counts(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, tuple) and bool(value) and all(map(_is_count, value)))


def _are_paths(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(path, str) and path for path in value)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


MOST_PER_RANK = max(PER_RANK)
_COUNT = "use an integer of at least 1, or None to let the planner choose"
_FLAG = "use True or False"
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "loss_fn": (
        lambda value: callable(value) and not isinstance(value, type),
        "pass loss_fn(output, target) -> scalar, such as loss_fn=torch.nn.MSELoss() (an instance)",
    ),
    "stages": (_is_count, _COUNT),
    "micro_batches": (_is_count, _COUNT),
    "stages_per_rank": (
        lambda value: value == "auto" or (_is_count(value) and value <= MOST_PER_RANK),
        f'use a number of at most {MOST_PER_RANK}, or "auto"',
    ),
    "replicas": (_are_counts, "use a number, or one for each stage: replicas=(2, 1)"),
    "cuts": (_are_paths, 'use module paths: cuts=["transformer.h.4"]'),
    "together": (
        lambda value: isinstance(value, tuple) and all(map(_are_paths, value)),
        'use module paths, or groups of them: together=["encoder", ("a", "b")]',
    ),
    "pins": (
        lambda pins: isinstance(pins, Mapping) and all(isinstance(p, str) and type(s) is int for p, s in pins.items()),
        'map module paths to stages: pins={"lm_head": 3}',
    ),
    "token_slices": (
        lambda value: value == "auto" or _are_counts(value),
        'use "auto", a number of slices, or their lengths: token_slices=(64, 32)',
    ),
    "recompute": (
        lambda value: value in choices("recompute") or (value and _are_paths(value)),
        'use "auto", "off", "all", or patterns of module paths: recompute=["model.layers.*"]',
    ),
    "zero": (
        lambda value: value == "auto" or (type(value) is int and value in (0, 1)),
        'use 0, 1 or "auto": only ZeRO-1 exists, replicas share the optimizer state, not gradients or weights',
    ),
    "rows_axis": (
        lambda axes: isinstance(axes, Mapping) and all(isinstance(n, str) and _is_axis(axes[n]) for n in axes),
        'map names of inputs to an axis, or to None: rows_axis={"positions": 1, "class_weights": None}',
    ),
    "master_weights": (_is_flag, _FLAG),
    "sync_batchnorm": (_is_flag, _FLAG),
    "bucket_bytes": (
        lambda value: _is_count(value) and value <= MAX_BUCKET_BYTES,
        f'use bytes, at most {MAX_BUCKET_BYTES}: bucket_bytes=4 << 20 or bucket_bytes="4MiB"',
    ),
    "prove": (_is_seconds, "use a number of seconds, such as prove=10"),
    "cache": (_is_flag, _FLAG),
    "seed": (lambda value: isinstance(value, int), "use an integer"),
    "timeout": (lambda value: _is_seconds(value) and value > 0, "use a number of seconds above 0, such as timeout=600"),
    "weights": (
        lambda value: isinstance(value, str) and bool(value),
        'pass a safetensors file, a folder with such files, the folder of a checkpoint, or "init"',
    ),
}
"""Whether a value is possible, and what to use instead.  Other options take one of `choices`, or anything."""


def read_value(name: str, value: Any) -> Any:
    """Return the value of an option in the form of `Options`.  Raises UsageError for an impossible value."""
    value = _CONVERTERS.get(name, lambda same: same)(value)
    known = choices(name)
    if name in _CHECKS:
        check, fix = _CHECKS[name]
        if not check(value):
            raise UsageError(f"{name} is {value!r}", fix=fix)
    elif known and value not in known and not (name == "costs" and callable(value)):
        near = difflib.get_close_matches(str(value).lower(), known, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        other = ", or a function of your own" if name == "costs" else ""
        raise UsageError(f"unknown {name} {value!r}", fix=f"{advice}use one of {', '.join(known)}{other}")
    return value


# ---- reading ---------------------------------------------------------------------------------------------------------

_PLANNED = (
    "stages", "micro_batches", "cuts", "schedule", "stages_per_rank", "replicas", "replica_policy", "recompute",
    "token_slices", "zero", "bucket_bytes", "together", "pins", "prove",
)  # fmt: skip
"""The options that a plan decides."""
_DEFAULTS = Options()


def read_options(**given: Any) -> Options:
    """Read keyword arguments; None stands for the default.

    Raises UsageError for an unknown name, an impossible value, and an option that plan= decides.
    """
    for name in given:
        if name not in OptionsDict.__annotations__:
            raise unknown(name, list(OptionsDict.__annotations__))
    options = Options(**{name: read_value(name, value) for name, value in given.items() if value is not None})
    if options.plan is not None:
        for name in _PLANNED:
            if getattr(options, name) != getattr(_DEFAULTS, name):
                raise UsageError(f"both plan= and {name}= are given", why="the plan decides it", fix=f"drop {name}=")
    return options

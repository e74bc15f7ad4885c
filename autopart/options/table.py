"""The table of options: each field of `Options` is a row, with all that is said of one option."""

# ruff: noqa: RUF009 - rows are frozen

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from autopart.capture.trace.export import LossFn
from autopart.costs.sources import COST_SOURCES, CostSource
from autopart.files.schedule_csv import read_schedule_csv
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan, Precision
from autopart.ir.program import MAX_BUCKET_BYTES
from autopart.ir.shares import POLICIES, Policy
from autopart.passes.program.given import given_schedule
from autopart.passes.program.orders import Schedule
from autopart.passes.program.schedules import names, register
from autopart.passes.search.space import PER_RANK, Watch
from autopart.runtime.group.world import transports

PlanLike = Plan | str | os.PathLike[str]

# ---- what stands in a row --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Values:
    """The possible values of an option: words, and others.

    check: whether a value that is not one of the words is possible.  fix: what to use instead of one that is not; "" to
    list the words.  convert: brings a value to the form of its field; one that it cannot is left to the check.  words:
    or a function that returns them, where users may add some.  auto: whether "auto" stands for None.
    """

    check: Callable[[Any], bool] = lambda value: False
    fix: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    words: Iterable[str] | Callable[[], Iterable[str]] = ()
    auto: bool = False

    def leaves_open(self, value: Any) -> bool:
        """Return whether a value leaves the option at its default."""
        return value is None or (self.auto and isinstance(value, str) and value == "auto")

    def choices(self) -> tuple[str, ...]:
        """Return the words; () for an option without."""
        return tuple(self.words() if callable(self.words) else self.words)

    def read(self, name: str, value: Any) -> Any:
        """Return a value of the option `name` in the form of its field.  Raises UsageError for an impossible one."""
        value, known = self.convert(value), self.choices()
        if self.check(value) or value in known:
            return value
        if self.fix:
            raise UsageError(f"{name} is {value!r}", fix=self.fix)
        near = difflib.get_close_matches(str(value).lower(), known, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        other = ", or a function of your own" if self.check is callable else ""
        raise UsageError(f"unknown {name} {value!r}", fix=f"{advice}use one of {', '.join(known)}{other}")


@dataclass(frozen=True, slots=True)
class Option:
    """The row of an option: all that is said of it besides name, type and default.

    text: its meaning, for docstrings and the help of its flag.  planned: whether a plan decides it.  group: the heading
    of the group of options that begins with it.
    """

    text: str
    values: Values
    planned: bool = False
    group: str = ""


ANYTHING = Values(lambda value: True)


def option(text: str, values: Values = ANYTHING, *, default: Any = None, planned: bool = False, group: str = "") -> Any:
    """Return the field of an option.  default: its value, or the type that makes it.  The rest: as in `Option`."""
    made = {"default_factory": default} if default is dict else {"default": default}
    return field(**made, metadata={"option": Option(text, values, planned, group)})


# ---- forms and checks ------------------------------------------------------------------------------------------------

_MOST_PER_RANK = max(PER_RANK)
_RECOMPUTE = ("auto", "off", "all")
_PRECISIONS = {
    "fp32": ("float32", "32", "32-true", torch.float32),
    "bf16": ("bfloat16", "bf16-mixed", torch.bfloat16),
    "fp16": ("float16", "half", "16-mixed", "fp16-mixed", torch.float16),
}
"""The other names that torch and other libraries give to each precision."""


def _schedule(value: Any) -> Any:
    if isinstance(value, str | os.PathLike) and os.fspath(value).endswith(".csv"):
        value = given_schedule(Path(value).stem, read_schedule_csv(value))
    return register(value).name if callable(value) or isinstance(value, Schedule) else value


def _recompute(value: Any) -> Any:
    found = _as_tuple(value)
    return found[0] if isinstance(found, tuple) and found[:1] in [(word,) for word in _RECOMPUTE] else found


def _as_tuple(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return tuple(sorted(value, key=repr))  # in one order on every rank
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _as_paths(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _as_groups(value: Any) -> Any:
    groups = _as_paths(value)
    return tuple(map(_as_paths, groups)) if isinstance(groups, tuple) else groups


def _as_bytes(value: Any) -> Any:
    try:
        return int(_BYTES.validate_python(value)) if isinstance(value, str) else value
    except ValidationError:
        return value


_BYTES = TypeAdapter(ByteSize)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_counts(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, tuple) and bool(value) and all(map(_is_count, value)))


def _are_paths(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(path, str) and path for path in value)


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _maps_texts(value: Any, is_entry: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and is_entry(value[key]) for key in value)


_COUNT = Values(_is_count, 'use an integer of at least 1, or None or "auto" to let the planner choose', auto=True)
_FLAG = Values(lambda value: isinstance(value, bool), "use True or False")

# ---- the list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """Options.  The planner decides what you leave out, or pass as None, unless a default is named."""

    loss_fn: LossFn | None = option(
        "loss_fn(output, target) -> scalar, for a model that does not return its loss",
        Values(
            lambda value: callable(value) and not isinstance(value, type),
            "pass loss_fn(output, target) -> scalar, such as loss_fn=torch.nn.MSELoss() (an instance)",
        ),
        group="The options that matter first",
    )
    stages: int | None = option("number of pipeline stages", _COUNT, planned=True)
    micro_batches: int | None = option("number of micro-batches of a step", _COUNT, planned=True)
    replicas: int | tuple[int, ...] | None = option(
        "devices that run each stage on different rows: one number, or one for each stage, (8, 8, 4)",
        Values(_are_counts, "use a number, or one for each stage: replicas=(2, 1)", _as_tuple, auto=True),
        planned=True,
    )
    tensor_parallel: int | str = option(
        "ranks that divide the weights and the work of every stage: attention heads, hidden axes, the vocabulary, and "
        'tokens in between; they lie next to each other on the fastest links; "auto" tries all that fit there',
        Values(_is_count, 'use an integer of at least 1, or "auto"', words=("auto",)),
        default=1,
        planned=True,
    )
    precision: Precision | None = option(
        '"fp32" runs the model as it is, "bf16" and "fp16" run it as under torch.autocast; default: the precision of '
        'plan=, else "fp32"',
        Values(
            convert=lambda value: next((name for name, others in _PRECISIONS.items() if value in others), value),
            words=_PRECISIONS,
        ),
    )
    optimizer: Any = option(
        "optimizer whose state is charged to memory: a class, a function of the parameters, an optimizer, or "
        '"sgd", "momentum", "adam", "adamw", each also with "+masters"; default: Adam',
    )
    schedule: str = option(
        'order of forwards and backwards: "auto", "1f1b", "1f1b-deep" (a longer warm-up: a shorter step for more '
        'activation memory), "gpipe"; with split backwards "zb-h1", "zb-h2"; with several stages a rank '
        '"interleaved", "zb-v"; "searched" for this plan; asynchronous "pipedream" and "pipedream-2bw" '
        "(`Pipe.train`); or a function of your own, (stages, micro-batches) -> computes of each stage in order",
        Values(convert=_schedule, words=lambda: ("auto", *names())),
        default="auto",
        planned=True,
        group="Cuts and schedule",
    )
    stages_per_rank: int | str = option(
        'number of stages that each rank runs; "auto" tries 1, 2, 4 and 8 if stages= and cuts= allow it; stages= '
        "counts the stages of all ranks",
        Values(
            lambda value: _is_count(value) and value <= _MOST_PER_RANK,
            f'use a number of at most {_MOST_PER_RANK}, or "auto"',
            words=("auto",),
        ),
        default="auto",
        planned=True,
    )
    cuts: tuple[str, ...] = option(
        "module paths at which a stage begins",
        Values(_are_paths, 'use module paths: cuts=["transformer.h.4"]', _as_paths),
        default=(),
        planned=True,
    )
    together: tuple[tuple[str, ...], ...] = option(
        "module paths, or groups of them, inside which no stage begins",
        Values(
            lambda value: isinstance(value, tuple) and all(map(_are_paths, value)),
            'use module paths, or groups of them: together=["encoder", ("a", "b")]',
            _as_groups,
        ),
        default=(),
        planned=True,
    )
    pins: Mapping[str, int] = option(
        "stage that runs a module: {module path: number of the stage}",
        Values(
            lambda value: _maps_texts(value, lambda stage: type(stage) is int),
            'map module paths to stages: pins={"lm_head": 3}',
        ),
        default=dict,
        planned=True,
    )
    token_slices: str | int | tuple[int, ...] | None = option(
        "cut the sequences of a causal model into slices that run on different stages at once (TeraPipe): a number of "
        'slices, or their lengths; "auto" slices if that shortens the step; by default sequences stay whole',
        Values(
            _are_counts, 'use "auto", a number of slices, or their lengths: token_slices=(64, 32)', _as_tuple, ("auto",)
        ),
        planned=True,
    )
    recompute: str | tuple[str, ...] = option(
        'activation checkpointing: "auto" (what the model checkpoints, and more when memory would not suffice), '
        '"off", "all", or patterns of module paths: these modules and nothing else',
        Values(
            lambda value: bool(value) and _are_paths(value),
            'use "auto", "off", "all", or patterns of module paths: recompute=["model.layers.*"]',
            _recompute,
            _RECOMPUTE,
        ),
        default="auto",
        planned=True,
        group="Memory",
    )
    zero: int | str = option(
        'share the optimizer\'s state among the replicas of a stage (ZeRO-1): 1, 0, or "auto" (if that shortens the '
        "step, or memory would otherwise not suffice)",
        Values(
            lambda value: type(value) is int and value in (0, 1),
            'use 0, 1 or "auto": only ZeRO-1 exists, replicas share the optimizer state, not gradients or weights',
            words=("auto",),
        ),
        default="auto",
        planned=True,
    )
    master_weights: bool = option(
        "keep fp32 master weights of bf16 and fp16 parameters: `Pipe.parameters` yields the masters, and the model "
        "gets their rounded values before every run",
        _FLAG,
        default=False,
    )
    replica_policy: Policy | None = option(
        '"split" gives each replica a share of the rows of every micro-batch, "turn" gives replicas whole '
        'micro-batches, round robin; default: "split"',
        Values(words=POLICIES),
        planned=True,
        group="Replicas",
    )
    sync_batchnorm: bool = option(
        "take batch statistics over the whole micro-batch, not over each replica's own rows", _FLAG, default=False
    )
    bucket_bytes: int | None = option(
        'size of the buckets in which replicas sum gradients: bytes, or "4MiB"; default: 25 MiB',
        Values(
            lambda value: _is_count(value) and value <= MAX_BUCKET_BYTES,
            f'use bytes, at most {MAX_BUCKET_BYTES}: bucket_bytes=4 << 20 or bucket_bytes="4MiB"',
            _as_bytes,
        ),
        planned=True,
    )
    plan: PlanLike | None = option(
        "a Plan or the path of a plan file, instead of the options that it decides", group="Search"
    )
    costs: str | CostSource = option(
        'times of ops: "measured" on this machine, "analytic" from FLOPs and bytes, "auto" (measured if the device is '
        'present and the model has weights), "compiled" (measured in compiled code, the default with '
        'backend="inductor"), or a function of your own',
        Values(callable, words=COST_SOURCES),
        default="auto",
    )
    prove: float = option(
        "seconds for CP-SAT to bound the step of the chosen stages; 0 for none",
        Values(_is_seconds, "use a number of seconds, such as prove=10"),
        default=0.0,
        planned=True,
    )
    cache: bool = option(
        "reuse the plan that answered the same question before; False searches again", _FLAG, default=True
    )
    watch: Watch | None = option(
        "watch(phase, best step in ns or 0, lower bound in ns or 0), called during the search",
        Values(callable, "pass a function: watch=lambda phase, best_ns, bound_ns: print(phase)"),
    )
    rows_axis: Mapping[str, int | None] = option(
        'axis on which inputs have rows, None for an input without: {"positions": 1, "weights": None}; of others, '
        "those whose axis 0 has as many entries as most others' are taken to have rows there",
        Values(
            lambda value: _maps_texts(value, lambda axis: axis is None or type(axis) is int),
            'map names of inputs to an axis, or to None: rows_axis={"positions": 1, "class_weights": None}',
        ),
        default=dict,
        group="Running",
    )
    loss_reduction: str = option(
        'how the losses of rows combine: "auto" derives it; "mean", "sum", "token-mean" are checked',
        Values(words=("auto", "mean", "sum", "token-mean")),
        default="auto",
    )
    non_finite: str = option(
        'what a step does when a gradient is infinite or NaN on any rank: "skip" adds nothing and sets '
        '`Pipe.skipped`, "raise" raises NonFiniteError, "auto" skips in fp16 and otherwise does not check',
        Values(words=("auto", "skip", "raise")),
        default="auto",
    )
    seed: int = option(
        'seed of dropout, and of weights="init"',
        Values(lambda value: isinstance(value, int), "use an integer"),
        default=0,
    )
    timeout: float | None = option(
        "seconds that a rank waits for another one before it fails and names that rank; capture and planning do not "
        "count; default: AUTOPART_TIMEOUT_S, else 600",
        Values(lambda value: _is_seconds(value) and value > 0, "use a number of seconds above 0, such as timeout=600"),
    )
    transport: str = option(
        'what carries messages: "nccl" (a CUDA device for each rank), "gloo" (CPUs, and CUDA devices that ranks may '
        'share), "auto" (NCCL for CUDA devices)',
        Values(words=transports),
        default="auto",
    )
    backend: str = option(
        'what runs the ops of a stage: "eager"; "inductor", which compiles them (needs a C++ compiler for CPUs, '
        "Triton for CUDA; what cannot be compiled runs eagerly, with a warning)",
        Values(words=("eager", "inductor")),
        default="eager",
    )
    weights: str | None = option(
        "values of a model that was built on the meta device, of which each rank makes its own part: a safetensors "
        'file, a folder of them, or a checkpoint; "init" runs the model\'s own initialisation with seed=',
        Values(
            lambda value: isinstance(value, str) and bool(value),
            'pass a safetensors file, a folder with such files, the folder of a checkpoint, or "init"',
            lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value,
        ),
    )

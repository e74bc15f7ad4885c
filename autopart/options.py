"""The one list of options that `compile`, `plan`, `verify` and the command line take.

`Options` is the list: what each option means, in groups, its type and its default; `_READERS` says how a value is read.
`OptionsDict` repeats the names with the types that a caller may pass, for editors and type checkers; a test holds the
names equal.  The docstrings of the front door and the flags of the command line follow from this list.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from autopart.capture.trace.export import LossFn
from autopart.costs.sources import COST_SOURCES, CostSource
from autopart.ir.errors import UsageError
from autopart.ir.plan import Plan, Precision
from autopart.ir.program import MAX_BUCKET_BYTES
from autopart.ir.shares import POLICIES, Policy
from autopart.passes.program.schedules import Order, Schedule, names, register
from autopart.passes.search.space import Watch
from autopart.runtime.group.world import transports

OptimizerLike = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
PlanLike = Plan | str | os.PathLike[str]


class OptionsDict(TypedDict, total=False):
    """The options as keyword arguments: what `compile`, `plan` and `verify` accept."""

    loss_fn: LossFn | None
    stages: int | None
    micro_batches: int | None
    replicas: int | Sequence[int] | None
    precision: Precision | torch.dtype | str | None
    optimizer: OptimizerLike | None
    schedule: str | Order | Schedule | None
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
    loss_reduction: Literal["auto", "mean", "sum", "token-mean"] | None
    non_finite: Literal["auto", "skip", "raise"] | None
    seed: int
    timeout: float | None
    transport: Literal["auto", "nccl", "gloo"] | None


@dataclass(frozen=True, slots=True)
class Options:
    """Options.  What is left out, or None, is decided by the planner or has the default that is named.

    The options that matter first:
        loss_fn         loss_fn(output, target) -> scalar, for a model that does not return its loss
        stages          number of pipeline stages
        micro_batches   number of micro-batches of a step
        replicas        devices that run each stage on different rows: one number, or one for each stage, (8, 8, 4)
        precision       "fp32" runs the model as it is, "bf16" and "fp16" run it as under torch.autocast; None is the
                        precision of plan=, else "fp32"
        optimizer       optimizer whose state is charged to memory: a class, a function of the parameters, an
                        optimizer, or "sgd", "momentum", "adam", "adamw", each also with "+masters"; None charges Adam

    Cuts and schedule:
        schedule        order of forwards and backwards: "auto", "1f1b", "1f1b-deep" (a longer warm-up: a shorter step
                        for more activation memory), "gpipe", or a function of your own, (stages, micro-batches) ->
                        computes of each stage in order; "pipedream" (asynchronous) in `plan` only
        cuts            module paths at which a stage begins
        together        module paths, or groups of them, inside which no stage begins
        pins            stage that runs a module: {module path: number of the stage}
        token_slices    cut the sequences of a causal model into slices that run on different stages at once
                        (TeraPipe): a number of slices, or their lengths; "auto" cuts where that shortens the step;
                        None keeps sequences whole

    Memory:
        recompute       activation checkpointing: "auto" (what the model checkpoints, and more when memory would not
                        suffice), "off", "all", or patterns of module paths: these modules and nothing else
        zero            share the optimizer's state among the replicas of a stage (ZeRO-1): 1, 0, or "auto" (where that
                        shortens the step, or memory would otherwise not suffice)
        master_weights  keep fp32 master weights of bf16 and fp16 parameters: `Pipe.parameters` yields the masters, and
                        the model gets their rounded values before every run

    Replicas:
        replica_policy  "split" gives each replica a share of the rows of every micro-batch, "turn" gives replicas
                        whole micro-batches, round robin; None splits
        sync_batchnorm  take batch statistics over the whole micro-batch, not over each replica's own rows
        bucket_bytes    size of the buckets in which replicas sum gradients: bytes, or "4MiB"; None is 25 MiB

    Search:
        plan            a Plan or the path of a plan file, instead of the options that it decides
        costs           times of ops: "measured" on this machine, "analytic" from FLOPs and bytes, "auto" (measured
                        where the device is present and the model has weights), or a function of your own
        prove           seconds for CP-SAT to bound the step of the chosen stages; 0 for none
        cache           reuse the plan that answered the same question before; False searches again
        watch           watch(phase, best step in ns or 0, lower bound in ns or 0), called during the search

    Running:
        loss_reduction  how the losses of rows combine: "auto" derives it; "mean", "sum", "token-mean" are checked
        non_finite      what a step does when a gradient is infinite or NaN on any rank: "skip" adds nothing and sets
                        `Pipe.skipped`, "raise" raises NonFiniteError, "auto" skips in fp16 and otherwise does not check
        seed            seed of dropout
        timeout         seconds that a rank waits for another one before it fails and names that rank; capture and
                        planning do not count; None is AUTOPART_TIMEOUT_S, else 600
        transport       what carries messages: "nccl" (a CUDA device for each rank), "gloo" (CPUs, and CUDA devices
                        that ranks may share), "auto" (NCCL for CUDA devices)
    """

    loss_fn: LossFn | None = None
    stages: int | None = None
    micro_batches: int | None = None
    replicas: int | tuple[int, ...] | None = None
    precision: Precision | None = None
    optimizer: Any = None
    schedule: str = "auto"
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
    loss_reduction: str = "auto"
    non_finite: str = "auto"
    seed: int = 0
    timeout: float | None = None
    transport: str = "auto"


# ---- readers: from what a caller passed to the value in the record; each raises UsageError --------------------------


def choices(name: str) -> tuple[str, ...]:
    """The words that an option takes; () for one that takes no words."""
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
    }
    return tuple(known.get(name, ()))


def _choice(name: str, value: Any) -> str:
    """One of the words that the option takes."""
    known = choices(name)
    if isinstance(value, str) and value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1)
    advice = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown {name} {value!r}", fix=f"{advice}use one of {', '.join(known)}")


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise UsageError(f"{name} is {value!r}", fix="use an integer of at least 1, or None to let the planner choose")
    return value


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int):
        raise UsageError(f"{name} is {value!r}", fix="use an integer")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}", fix="use True or False")
    return value


def read_seconds(name: str, value: Any) -> Any:
    """Check a number of seconds: above 0, for prove= also 0.  Raises UsageError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf or (value == 0 and name != "prove"):
        raise UsageError(f"{name} is {value!r}", fix=f"use a number of seconds above 0, for example {name}=600")
    return value


def _bytes(name: str, value: Any) -> int:
    """Read a number of bytes, or a text such as "25MB" or "4MiB"."""
    try:
        count = int(TypeAdapter(ByteSize).validate_python(value)) if isinstance(value, str) else value
    except ValidationError:
        count = None
    if type(count) is not int or count < 1:
        raise UsageError(f"{name} is {value!r}", fix=f'use bytes, for example {name}=4 << 20 or {name}="4MiB"')
    if count > MAX_BUCKET_BYTES:
        raise UsageError(f"{name} is {value!r}", fix=f"use at most {MAX_BUCKET_BYTES} bytes")
    return count


_PRECISIONS = {
    "fp32": ("fp32", "float32", "32", "32-true", torch.float32),
    "bf16": ("bf16", "bfloat16", "bf16-mixed", torch.bfloat16),
    "fp16": ("fp16", "float16", "half", "16-mixed", "fp16-mixed", torch.float16),
}
"""The names that torch and other libraries give to each precision."""


def _precision(name: str, value: Any) -> str:
    for precision, spellings in _PRECISIONS.items():
        if isinstance(value, str | torch.dtype) and value in spellings:
            return precision
    return _choice(name, value)


def _zero(name: str, value: Any) -> int | str:
    if value != "auto" and (type(value) is not int or value not in (0, 1)):
        raise UsageError(
            f"zero is {value!r}",
            why="only ZeRO-1 exists here: replicas share the optimizer's state, not gradients or weights",
            fix='use 0, 1 or "auto"',
        )
    return value  # type: ignore[no-any-return]


def _loss_fn(name: str, value: Any) -> LossFn:
    if isinstance(value, type):
        raise UsageError(f"loss_fn is the class {value.__name__}, not a loss", fix=f"pass loss_fn={value.__name__}()")
    if not callable(value):
        raise UsageError(f"loss_fn is a {type(value).__name__}", fix="pass loss_fn(output, target) -> scalar")
    return value  # type: ignore[no-any-return]


def _schedule(name: str, value: Any) -> str:
    """The name of a schedule; a function or a `Schedule` is registered under its own name."""
    if callable(value) or isinstance(value, Schedule):
        return register(value).name
    return _choice(name, value)


def _costs(name: str, value: Any) -> str | CostSource:
    if isinstance(value, str):
        return _choice(name, value)
    if not callable(value):
        words = ", ".join(choices(name))
        raise UsageError(f"costs is a {type(value).__name__}", fix=f"use one of {words}, or a function of your own")
    return value  # type: ignore[no-any-return]


def _paths(name: str, paths: Any) -> tuple[str, ...]:
    example = f'for example {name}=["transformer.h.4"]'
    if not isinstance(paths, Iterable):
        raise UsageError(f"{name} is a {type(paths).__name__}", fix=example)
    found = (paths,) if isinstance(paths, str) else tuple(paths)
    for path in found:
        if not isinstance(path, str) or not path:
            raise UsageError(f"{name}: {path!r} is not a module path", fix=example)
    return found


def _groups(name: str, groups: Any) -> tuple[tuple[str, ...], ...]:
    """Groups of module paths; a single path is a group of its own."""
    if not isinstance(groups, Iterable):
        raise UsageError(f"{name} is a {type(groups).__name__}", fix=f'for example {name}=["encoder", ("a", "b")]')
    return tuple(_paths(name, group) for group in ((groups,) if isinstance(groups, str) else groups))


def _recompute(name: str, value: Any) -> str | tuple[str, ...]:
    """One of the words, or patterns of module paths."""
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if len(found) == 1 and found[0] in choices(name):
        return str(found[0])
    if isinstance(value, str) or not found or not all(isinstance(pattern, str) and pattern for pattern in found):
        raise UsageError(
            f"unknown recompute {value!r}",
            fix=f"use one of {', '.join(choices(name))}, or a list of patterns of module paths: "
            'recompute=["model.layers.*"]',
        )
    return found


def _pins(name: str, pins: Any) -> Mapping[str, int]:
    if not isinstance(pins, Mapping) or not all(isinstance(p, str) and type(s) is int for p, s in pins.items()):
        raise UsageError(f"pins is {pins!r}", fix='map module paths to stages: pins={"lm_head": 3}')
    return dict(pins)


def _numbers(name: str, value: Any) -> str | int | tuple[int, ...]:
    """A positive integer, or several of them; for token_slices also "auto"."""
    if name == "token_slices" and isinstance(value, str) and value == "auto":
        return value
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not found or not all(type(number) is int and number > 0 for number in found):
        words = '"auto", a number, or the lengths' if name == "token_slices" else "a number, or one for each stage"
        raise UsageError(f"{name} is {value!r}", fix=f"use {words}: {name}=(2, 1)")
    return value if isinstance(value, int) else found


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "loss_fn": _loss_fn,
    "stages": _count,
    "micro_batches": _count,
    "replicas": _numbers,
    "precision": _precision,
    "schedule": _schedule,
    "cuts": _paths,
    "together": _groups,
    "pins": _pins,
    "token_slices": _numbers,
    "recompute": _recompute,
    "zero": _zero,
    "master_weights": _flag,
    "sync_batchnorm": _flag,
    "bucket_bytes": _bytes,
    "costs": _costs,
    "prove": read_seconds,
    "cache": _flag,
    "seed": _integer,
    "timeout": read_seconds,
}
"""How the value of an option is read.  For others `choices` lists the words; optimizer, plan and watch are not read."""

# ---- names that are not options ------------------------------------------------------------------------------------

_COUNT = "micro_batches= is the number of micro-batches of a step"
_OTHER_NAMES = {
    "n_microbatches num_microbatches num_micro_batches n_micro_batches microbatches chunks": _COUNT,
    "gradient_accumulation_steps accumulate_grad_batches": f"{_COUNT}; the sample is the batch of all of them",
    "micro_batch_size microbatch_size train_micro_batch_size_per_gpu": f"{_COUNT}: batch rows / micro_batch_size",
    "num_stages n_stages pp pp_size pipeline_parallel_size pipeline_model_parallel_size": "stages= is their number",
    "dp dp_size data_parallel_size num_replicas": "replicas= is the number of devices of each stage",
    "split_points split_spec balance": "cuts= takes the module paths at which a stage begins",
    "batch example_args example_inputs example_kwargs mb_args inputs": "sample= takes one whole batch",
    "loss criterion": "loss_fn= takes the loss function",
    "dtype amp autocast mixed_precision bf16 fp16": 'precision= takes "fp32", "bf16" or "fp16"',
    "activation_checkpointing gradient_checkpointing checkpoint remat": 'recompute= takes "auto", "off" or "all"',
    "zero_stage zero_optimization sharding_strategy": 'zero= takes 0, 1 or "auto"',
    "bucket_cap_mb": "bucket_bytes= is the size of a bucket in bytes",
    "backend": 'transport= takes "auto", "nccl" or "gloo"',
    "compress": "gradients are always summed exactly; drop it",
}
"""What to use here for names that torch, DeepSpeed, Megatron, Lightning and Accelerate give to the same wish."""


def _unknown(name: str) -> UsageError:
    other = next((advice for words, advice in _OTHER_NAMES.items() if name in words.split()), "")
    near = difflib.get_close_matches(name, [*OptionsDict.__annotations__, "sample", "cluster"], n=1)
    guess = f"did you mean {near[0]}=?" if near else f"use one of {', '.join(OptionsDict.__annotations__)}"
    return UsageError(f"there is no option {name}=", fix=other or guess)


# ---- reading -------------------------------------------------------------------------------------------------------

_DECIDED = (
    "stages", "micro_batches", "cuts", "schedule", "replicas", "replica_policy", "recompute", "token_slices", "zero",
    "bucket_bytes", "together", "pins", "prove",
)  # fmt: skip
"""The options that a plan decides."""


def read_options(**given: Any) -> Options:
    """Read what a caller passed; None stands for the default.

    Raises UsageError for an unknown name, an impossible value, and an option that a given plan decides.
    """
    for name in given:
        if name not in OptionsDict.__annotations__:
            raise _unknown(name)
    taken = {name: value for name, value in given.items() if value is not None}
    for name, value in taken.items():
        reader = _READERS.get(name) or (_choice if choices(name) else None)
        taken[name] = reader(name, value) if reader else value
    options = Options(**taken)
    if options.plan is not None:
        for name in _DECIDED:
            if getattr(options, name) not in (None, (), "auto", {}, 0.0):
                raise UsageError(
                    f"both plan= and {name}= are given", why="a plan fixes that already", fix=f"drop {name}="
                )
    return options

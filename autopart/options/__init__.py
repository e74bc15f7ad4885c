"""The one list of options of `compile`, `plan`, `verify` and the command line.

`table.Options` is the list.  A row has the name, type and default of an option, and (`table.Option`) what it means, its
possible values, how they are read, and whether a plan decides it.  Docstrings, checks and flags come from the rows;
`OptionsDict` repeats the names with the types that a caller may pass, for editors and type checkers, and a test
compares the two.

May enter: what an option is, how its value is read, and what else callers may have meant.
"""

from __future__ import annotations

import difflib
import os
import re
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
from autopart.options.table import Option, Options, PlanLike
from autopart.passes.program.orders import Order, Schedule
from autopart.passes.search.space import Watch

__all__ = ["OPTIONS", "OptimizerLike", "Options", "OptionsDict", "PlanLike", "given", "read_options", "stated"]

OptimizerLike = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


class OptionsDict(TypedDict, total=False):
    """The options as keyword arguments of `compile`, `plan` and `verify`."""

    loss_fn: LossFn | None
    stages: Literal["auto"] | int | None
    micro_batches: Literal["auto"] | int | None
    replicas: Literal["auto"] | int | Sequence[int] | None
    tensor_parallel: Literal["auto"] | int
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
            raise _unknown(name)
    decided = {name: value for name, value in given.items() if not OPTIONS[name].values.leaves_open(value)}
    options = Options(**{name: OPTIONS[name].values.read(name, value) for name, value in decided.items()})
    if options.plan is not None:
        for name, row in OPTIONS.items():
            value, default = getattr(options, name), getattr(_DEFAULTS, name)
            asked = name in decided and value and value != "auto"  # tensor_parallel=1 decides, though it is the default
            if row.planned and (value != default or asked):
                raise UsageError(f"both plan= and {name}= are given", why="the plan decides it", fix=f"drop {name}=")
    return options


def given(options: Options) -> dict[str, object]:
    """Return the options that differ from their defaults, by name."""
    return {name: value for name in OPTIONS if (value := getattr(options, name)) != getattr(_DEFAULTS, name)}


_OWN = ("plan", "costs", "cache", "watch", "prove", "timeout", "weights", "loss_fn")
"""Options that may differ between ranks: rank 0's counts, or they are of the process."""


def stated(options: Options) -> dict[str, str]:
    """Return the options that have to be alike on all ranks, as texts without addresses of objects."""
    return {name: re.sub(" at 0x[0-9a-f]+", "", repr(getattr(options, name))) for name in OPTIONS if name not in _OWN}


def _unknown(name: str) -> UsageError:
    """Return the error for a name that is not an option."""
    other = next((advice for words, advice in _OTHER_NAMES.items() if name in words.split()), "")
    near = difflib.get_close_matches(name, [*OPTIONS, "sample", "cluster"], n=1)
    guess = f"did you mean {near[0]}=?" if near else f"use one of {', '.join(OPTIONS)}"
    return UsageError(f"there is no option {name}=", fix=other or guess)


_MICROS = "micro_batches= is the number of micro-batches of a step"
_OTHER_NAMES = {
    "n_microbatches num_microbatches num_micro_batches n_micro_batches microbatches chunks": _MICROS,
    "gradient_accumulation_steps accumulate_grad_batches": f"{_MICROS}; the sample is the batch of all of them",
    "micro_batch_size microbatch_size train_micro_batch_size_per_gpu": f"{_MICROS}: batch rows / micro_batch_size",
    "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage interleave_factor n_local_stages": (
        "stages_per_rank= is the number of stages of each rank"
    ),
    "num_stages n_stages pp pp_size pipeline_parallel_size pipeline_model_parallel_size": "stages= is their number",
    "dp dp_size data_parallel data_parallel_size num_replicas": "replicas= is the number of devices of each stage",
    "split_points split_spec balance": "cuts= takes the module paths at which a stage begins",
    "batch example_args example_inputs example_kwargs mb_args inputs": "sample= takes one whole batch",
    "loss criterion": "loss_fn= takes the loss function",
    "dtype amp autocast mixed_precision bf16 fp16": 'precision= takes "fp32", "bf16" or "fp16"',
    "activation_checkpointing gradient_checkpointing checkpoint remat": 'recompute= takes "auto", "off" or "all"',
    "zero_stage zero_optimization sharding_strategy": 'zero= takes 0, 1 or "auto"',
    "train_batch_size per_device_train_batch_size global_batch_size batch_size": (
        "sample= takes one whole batch; its rows count"
    ),
    "find_unused_parameters static_graph gradient_as_bucket_view broadcast_buffers": (
        "drop it: a plan knows what is used"
    ),
    "max_memory": "memory: of a device in a cluster file limits the plan",
    "tp tp_size tensor_parallel_size tensor_model_parallel_size mesh device_mesh": "tensor_parallel= is their number",
    "fsdp fsdp_config deepspeed deepspeed_config": 'drop it: the plan divides the model; zero= takes 0, 1 or "auto"',
    "world_size nproc_per_node num_processes num_gpus device devices device_map device_ids": (
        'cluster= takes "cpu:2", "cuda:8" or a file'
    ),
    "partition_method num_layers_per_stage": "cuts= takes the module paths at which a stage begins",
    "activation_checkpoint_interval checkpoint_activations": 'recompute= takes "auto", "off", "all" or module patterns',
    "gradient_clipping max_grad_norm clip_grad gradient_clip_val": "call pipe.clip_grad_norm_(max_norm)",
    "torch_compile compile_model": 'backend="inductor" compiles the stages',
    "lr learning_rate weight_decay": "make an optimizer of pipe.parameters()",
    "bucket_cap_mb": "bucket_bytes= is the size of a bucket in bytes",
    "pad_to pad_with": (
        "pad in the collate function of the loader, to a few lengths: DataCollatorWithPadding(pad_to_multiple_of=64)"
    ),
    "compress": "gradients are always summed exactly; drop it",
}
"""What to use instead of options of torch, DeepSpeed, Megatron, Lightning and Accelerate."""

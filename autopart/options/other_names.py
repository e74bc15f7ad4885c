"""What to use instead of options of torch, DeepSpeed, Megatron, Lightning and Accelerate."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from autopart.ir.errors import UsageError

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
    "train_batch_size per_device_train_batch_size global_batch_size": "sample= takes one whole batch; its rows count",
    "tp tp_size tensor_parallel_size tensor_model_parallel_size mesh device_mesh": (
        "there is no tensor parallelism: a plan has stages= and replicas="
    ),
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


def unknown(name: str, known: Sequence[str]) -> UsageError:
    """Return the error for a name that is not an option.  known: the names of the options."""
    other = next((advice for words, advice in _OTHER_NAMES.items() if name in words.split()), "")
    near = difflib.get_close_matches(name, [*known, "sample", "cluster"], n=1)
    guess = f"did you mean {near[0]}=?" if near else f"use one of {', '.join(known)}"
    return UsageError(f"there is no option {name}=", fix=other or guess)

"""What a Trainer on a pipeline cannot do, found before its first step: settings, and methods that would never run.

Only what docs/trainer.md lists is taken; a setting that a later release of transformers adds is refused until a test
compares it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from autopart.ir.errors import UsageError

_SAME = (
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "gradient_accumulation_steps max_grad_norm bf16 bf16_full_eval fp16_full_eval activation_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile "
    "logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen "
    "eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
    "save_only_model save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model "
    "greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed "
    "use_cpu accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "remove_unused_columns label_names train_sampling_strategy length_column_name predict_with_generate "
    "generation_max_length generation_num_beams generation_config"
)
SAME = frozenset(_SAME.split())
"""Settings with which a run equals that of one process."""
_OUTSIDE = (
    "average_tokens_across_devices tf32 torch_compile_backend torch_empty_cache_steps log_on_each_node log_level "
    "log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
    "trackio_static_space_id save_on_each_node push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
    "hub_always_push hub_revision ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
    "ddp_backend ddp_timeout skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank"
)
OUTSIDE = frozenset(_OUTSIDE.split())
"""Settings of what is around a run, or of what a pipeline replaces: docs/trainer.md states their effect."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
STRATEGIES = ("random", "sequential", "group_by_length")
LEFT_OUT = (
    "compute_loss",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_prepare_context_parallel_inputs",
)
"""Methods that the trainer calls for a step in one process, and the mixin never does."""
_LOSS = "let forward() return the loss for labels"
_DROP = "drop it"
_REASONS = {
    "label_smoothing_factor": ("the loss is computed inside the pipeline", _LOSS),
    "fp16": ("the scale of the loss belongs to the pipeline there", "use bf16=True"),
    "auto_find_batch_size": ("the plan is made to fit the memory", _DROP),
    "neftune_noise_alpha": ("it adds a hook to the embedding, which would run once", "add the noise in forward()"),
    "enable_jit_checkpoint": ("one rank alone would save", "pipe.stop_requested is True on all ranks after SIGTERM"),
    **dict.fromkeys(("fsdp", "deepspeed"), ("they shard the model too", "drop it: the plan shares memory")),
}


def refused(what: str, why: str, fix: str) -> UsageError:
    """Return the error for what a Trainer cannot do on a pipeline."""
    return UsageError(f"a Trainer on a pipeline: {what}", why=why, fix=fix)


def require_possible(trainer: Any, mixin: type, replaced: tuple[str, ...]) -> None:
    """Raise UsageError for settings and methods that a pipeline cannot follow.  replaced: methods of the mixin that do
    not call those of the classes behind it."""
    _require_run(trainer, mixin, replaced)
    if trainer.compute_loss_func is not None:
        raise refused("compute_loss_func is given", "the loss is computed inside the pipeline", _LOSS)
    args = trainer.args
    for field in dataclasses.fields(_settings(type(args))):
        if field.name in SAME or field.name in OUTSIDE or _is_default(field, getattr(args, field.name)):
            continue
        why, fix = _REASONS.get(field.name, ("no test has compared it with a run in one process", _DROP))
        raise refused(f"{field.name} is set", why, fix)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise refused("DeepSpeed or FSDP is set", *_REASONS["fsdp"])
    if args.n_gpu > 1:
        raise refused("one process sees several GPUs", "a rank of the pipeline has one", "start it with torchrun")
    for name, chosen, known in (
        ("optim", args.optim, OPTIMIZERS),
        ("train_sampling_strategy", args.train_sampling_strategy, STRATEGIES),
        ("torch_compile_backend", args.torch_compile_backend or "inductor", ("inductor",)),
    ):
        if getattr(chosen, "value", chosen) not in known:
            raise refused(
                f"{name} is {getattr(chosen, 'value', chosen)!r}",
                "no test has compared it with a run in one process",
                f"use one of {', '.join(known)}" + ("; or override create_optimizer" if name == "optim" else ""),
            )
    for field in dataclasses.fields(args.accelerator_config):
        value = getattr(args.accelerator_config, field.name)
        if field.name not in ("even_batches", "non_blocking") and not _is_default(field, value):
            raise refused(f"accelerator_config.{field.name} is set", "every rank reads the whole batches", _DROP)


def _settings(kind: type) -> type:
    """Return the class of transformers that arguments belong to: fields that a user adds are the user's."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("transformers."))


def _is_default(field: Any, value: Any) -> bool:
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return bool(value == default) or not (value or default)  # __post_init__ makes {} or [] of None


def _require_run(trainer: Any, mixin: type, replaced: tuple[str, ...]) -> None:
    """Raise UsageError for an overridden method that would never run, by method and class."""
    order = type(trainer).__mro__
    behind = order[order.index(mixin) + 1 :]
    for kind in order:
        names = LEFT_OUT + replaced if kind in behind else LEFT_OUT
        own = {**vars(kind), **(vars(trainer) if kind is order[0] else {})}
        for name in names:
            home = getattr(own.get(name), "__module__", "")
            if name not in own or (kind.__module__ == "transformers.trainer" and home == kind.__module__):
                continue
            if name in LEFT_OUT:
                raise refused(
                    f"{name} is overridden in {kind.__name__}", "the loss is computed inside the pipeline", _LOSS
                )
            raise refused(
                f"{name} is overridden in {kind.__name__}",
                "the mixin in front of it runs a step of the pipeline in its place",
                f"class {order[0].__name__}({kind.__name__}, PipelineMixin, Trainer): it then runs, and calls "
                f"super().{name}(...)",
            )

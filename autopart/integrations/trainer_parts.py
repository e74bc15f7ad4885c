"""What the loop of a Trainer on a pipeline is given, and what it cannot do, found before its first step.

It gets the model that it trains, and the batches of a single process.  Refused are settings, and methods that would
never run.  Only what docs/trainer.md lists is taken; a setting that a later release of transformers adds is refused
until a test compares it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Set
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from autopart.ir.errors import UsageError
from autopart.pipe.pipe import Pipe
from autopart.state.misuse_guards import MissingError

_KNOWN = (
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "gradient_accumulation_steps max_grad_norm bf16 bf16_full_eval fp16_full_eval activation_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile "
    "logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen "
    "eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
    "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
    "save_only_model save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model "
    "greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed "
    "use_cpu accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "remove_unused_columns label_names length_column_name predict_with_generate generation_max_length "
    "generation_num_beams generation_config average_tokens_across_devices tf32 torch_empty_cache_steps "
    "log_on_each_node log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id "
    "trackio_bucket_id trackio_static_space_id save_on_each_node push_to_hub hub_token hub_private_repo hub_model_id "
    "hub_strategy hub_always_push hub_revision ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
    "ddp_static_graph ddp_backend ddp_timeout skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint "
    "local_rank"
)
KNOWN = frozenset(_KNOWN.split())
"""Settings that docs/trainer.md lists, with any value."""
VALUES: dict[str, tuple[str, ...]] = {
    "optim": ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "torch_compile_backend": ("inductor",),
}
"""Settings of which it lists some values."""
LEFT_OUT = (
    "compute_loss",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_prepare_context_parallel_inputs",
)
"""Methods that the trainer calls for a step in one process, and the mixin never does."""
_INSIDE = ("the loss is computed inside the pipeline", "let forward() return the loss for labels")
_UNKNOWN = ("no test has compared it with a run in one process", "drop it")
_REASONS = {
    "label_smoothing_factor": _INSIDE,
    "fp16": ("the scale of the loss belongs to the pipeline there", "use bf16=True"),
    "auto_find_batch_size": ("the plan is made to fit the memory", "drop it"),
    "neftune_noise_alpha": ("NEFTune hooks the embedding; that would run once", "add the noise in forward()"),
    "optim": (_UNKNOWN[0], f"use one of {', '.join(VALUES['optim'])}, or override create_optimizer"),
    **dict.fromkeys(("fsdp", "deepspeed"), ("they shard the model too", "drop it: the plan shares memory")),
}


def refused(what: str, why: str, fix: str) -> UsageError:
    """Return the error for what a Trainer cannot do on a pipeline."""
    return UsageError(f"a Trainer on a pipeline: {what}", why=why, fix=fix)


def require_possible(trainer: Any, mixin: type, replaced: tuple[str, ...]) -> None:
    """Raise UsageError for settings and methods that a pipeline cannot follow.  replaced: methods of the mixin that do
    not call those of the classes behind it."""
    _require_run(trainer, mixin, replaced)
    args = trainer.args
    if trainer.compute_loss_func is not None:
        raise refused("compute_loss_func is given", *_INSIDE)
    if args.n_gpu > 1:
        raise refused("one process sees several GPUs", "a rank of the pipeline has one", "start it with torchrun")
    kind = next(base for base in type(args).__mro__ if base.__module__.startswith("transformers."))
    _require_known(args, kind, KNOWN, "")  # fields that a class of the user adds are the user's
    _require_known(
        args.accelerator_config,
        type(args.accelerator_config),
        {"even_batches", "non_blocking"},
        "of accelerator_config ",
    )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise refused("DeepSpeed or FSDP is set", *_REASONS["fsdp"])


def _require_known(args: Any, kind: type, known: Set[str], of: str) -> None:
    for field in dataclasses.fields(kind):
        value, default = getattr(args, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        value = getattr(value, "value", value)
        same = value == default or not (value or default)  # __post_init__ makes {} or [] of None
        if field.name in known or same or value in VALUES.get(field.name, ()):
            continue
        raise refused(f"{field.name} {of}is set to {value!r:.80}", *_REASONS.get(field.name, _UNKNOWN))


def _require_run(trainer: Any, mixin: type, replaced: tuple[str, ...]) -> None:
    """Raise UsageError for an overridden method that would never run, by method and class."""
    order = type(trainer).__mro__
    behind = order[order.index(mixin) + 1 :]
    for kind in order:
        own = {**vars(kind), **(vars(trainer) if kind is order[0] else {})}
        for name in LEFT_OUT + replaced if kind in behind else LEFT_OUT:
            home = getattr(own.get(name), "__module__", "")
            if name not in own or (kind.__module__ == "transformers.trainer" and home == kind.__module__):
                continue
            why = "the mixin in front of it runs a step of the pipeline in its place"
            fix = f"class {order[0].__name__}({kind.__name__}, PipelineMixin, Trainer): it then runs, and calls super()"
            raise refused(f"{name} is overridden in {kind.__name__}", *(_INSIDE if name in LEFT_OUT else (why, fix)))


# ---- what the loop is given ------------------------------------------------------------------------------------------

_SHOWN = "train eval training zero_grad parameters named_parameters modules named_modules children named_children"


class PipelineModel:
    """What the loop of the trainer may do with the model that it trains.  Called in eval mode, it predicts."""

    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self.loss_only = False

    def __call__(self, **inputs: Any) -> Any:
        """Return what the model returns for a batch in eval mode, or its loss alone.  Collective."""
        if self._pipe.training:
            raise refused(
                "the model is called in a training step",
                "forward and backward of all micro-batches run together",
                "call super().training_step(model, inputs, num_items_in_batch)",
            )
        if self.loss_only:
            return {"loss": self._pipe.eval_loss(inputs).detach()}
        return tree_map_only(torch.Tensor, lambda value: value.to(self._device), self._pipe.predict(inputs))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the sums of replicas add up over the steps of an accumulation."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name in _SHOWN.split():
            return getattr(self._pipe, name)
        if name == "config":
            return self._pipe.model.config
        raise MissingError(
            f"the model that a pipeline trains has no {name!r}",
            fix="use trainer.pipe, or trainer.model after sync_model",
        )


def undivided(loader: Any) -> Any:
    """Return the loader, with its batches no longer divided among the ranks: all read those of a single process."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        what = "a streamed dataset" if isinstance(dataset, IterableDataset) else f"batches of a {type(loader).__name__}"
        raise refused(
            what, "ranks could read different batches", "pass a dataset with a length, or a DataLoader of one"
        )
    base = getattr(loader, "base_dataloader", loader)
    for name in ("batch_sampler", "sampler"):
        divided = getattr(base, name)
        if hasattr(divided, "num_processes") and hasattr(divided, "batch_sampler"):
            object.__setattr__(base, name, divided.batch_sampler)  # a loader of torch lets nobody set it
    return loader


def first_batch(loader: Any, prepare: Callable[[Any], Any]) -> Any:
    """Return the first batch, prepared; nothing that is drawn from for it has moved afterwards.

    It is read in this process: workers would start for it, and go on from it.
    """
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(one): one for holder in holders if (one := getattr(holder, "generator", None)) is not None}
    states = [(one, one.get_state()) for one in found.values()]
    own, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            single = loader.batch_sampler is None
            order = loader.sampler if single else loader.batch_sampler
            first = list(itertools.islice(order, 1))
            if not first:
                raise refused("the training data has no batch", "the pipeline is planned for one", "pass some data")
            chosen: dict[str, Any] = {"sampler": first, "batch_size": None}
            if not single:
                chosen = {"batch_sampler": first}
            return prepare(next(iter(DataLoader(loader.dataset, collate_fn=loader.collate_fn, **chosen))))
    finally:
        random.setstate(own)
        numpy.random.set_state(of_numpy)
        for one, state in states:
            one.set_state(state)

"""transformers' `Trainer` on a pipeline: a mixin that overrides the methods which run a step.

    class PipelineTrainer(PipelineMixin, Trainer): ...
    trainer = PipelineTrainer(model=model, args=args, train_dataset=data, pipeline={"stages": 2})

A callback of `Trainer` sees steps and cannot run them, so the smallest place for a pipeline is a subclass.  Every rank
reads the same whole batches, in the order of a single process.  Steps, evaluation and prediction run in the pipeline;
the model on each rank has the newest weights of that rank's stage alone, and all of them before it is saved and at the
end of `train`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from autopart.api import compile as compile_pipe
from autopart.ir.errors import UsageError
from autopart.session.pipe.pipe import Pipe

STATE = "autopart"
"""Folder in a checkpoint of the trainer that has weights and optimizer state of all ranks."""


class PipelineMixin:
    """Runs the steps of a `transformers.Trainer` as a pipeline.  Write it before the trainer class.

    pipeline: keyword arguments of `autopart.compile` besides the model and the sample; "cluster" too.  Start the script
    with torchrun.  While `train` runs, `pipe` is the running pipeline; it is planned for the first batch.  After
    `train` the model on every rank has the trained weights.

    Raises UsageError, where the trainer is made or its first batch is read, for what a pipeline cannot do: a loss
    outside of the model, fp16, DeepSpeed and FSDP, several devices in one process, streamed datasets.
    """

    pipe: Pipe | None = None
    _rows = 0

    def __init__(self, *args: Any, pipeline: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._pipeline = dict(pipeline or {})
        super().__init__(*args, **kwargs)
        trainer: Any = self
        _require_possible(trainer)
        trainer.args.average_tokens_across_devices = False  # all ranks have the same tokens

    # -- training --------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the pipeline at the end, with the trained weights in the model of every rank."""
        trainer: Any = super()
        own: Any = self
        if own.optimizer is not None:
            raise _refused(
                "an optimizer was passed", "it has parameters of other ranks", 'name it: optim="adamw_torch"'
            )
        try:
            result = trainer.train(*args, **kwargs)
        except BaseException:
            if self.pipe is not None:
                self.pipe.close(sync=False)
                self.pipe = None
            raise
        self._leave()
        return result

    def _leave(self) -> None:
        """Bring all weights to the model of this rank, and end the pipeline.  Collective."""
        own: Any = self
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
            own.optimizer = None  # of parameters of the pipeline
            own.model_wrapped = own.model

    def create_optimizer(self, model: Any = None) -> Any:
        """Compile the model for the first batch, and make the optimizer of this rank's parameters."""
        own: Any = self
        if self.pipe is None:
            with torch.random.fork_rng():  # reading a batch draws a seed
                sample = own._prepare_inputs(next(iter(own.get_train_dataloader())))
            sample = self._counted(sample, own._get_num_items_in_batch([sample], own.args.device))
            options = {"precision": "bf16" if own.args.bf16 else None, **self._pipeline}
            if own.args.torch_compile:
                options.setdefault("backend", "inductor")
            self.pipe = compile_pipe(own.model, options.pop("cluster", None), sample=sample, **options)
        return super().create_optimizer(self.pipe)  # type: ignore[misc]

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Return the names of the parameters that decay; the modules of the whole model decide."""
        own: Any = self
        names: list[str] = super().get_decay_parameter_names(own.model)  # type: ignore[misc]
        return names

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a step of the pipeline; return its loss as the trainer counts it, with its share of the accumulation."""
        own: Any = self
        model.train()
        inputs = self._counted(own._prepare_inputs(inputs), num_items_in_batch)
        divided = "num_items_in_batch" in inputs
        share = 1.0 if divided else 1.0 / own.current_gradient_accumulation_steps
        assert self.pipe is not None
        loss = self.pipe.step(inputs, scale=share if share != 1.0 else None)
        scaled: torch.Tensor = loss.detach() * share
        return scaled

    def _counted(self, inputs: dict[str, Any], items: Any) -> dict[str, Any]:
        """Return the inputs with the number of labels by which the model divides its loss, as the trainer passes it.

        What a model does with that number is its own: most divide a sum of losses by it, some ignore it.
        """
        own: Any = self
        if items is None or not own.model_accepts_loss_kwargs:
            return inputs
        return {**inputs, "num_items_in_batch": items}

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return model if self.pipe is None else _Trained(self.pipe)

    def _clip_grad_norm(self, model: Any) -> Any:
        own: Any = self
        assert self.pipe is not None
        return self.pipe.clip_grad_norm_(own.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        assert self.pipe is not None
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- data ------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of a single process: whole batches, the same on every rank."""
        return _whole_batches(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader of a single process: whole batches, the same on every rank."""
        return _whole_batches(super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader of a single process: whole batches, the same on every rank."""
        return _whole_batches(super().get_test_dataloader(test_dataset))  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of an update: all ranks work on the same batch."""
        own: Any = self
        return int(own._train_batch_size * args.gradient_accumulation_steps)

    # -- evaluation and whole weights --------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate whole batches on every rank, so that there is nothing to gather."""
        self.gather_function = self._own_rows  # the loop sets it back at its end
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Return loss, outputs and labels of a batch, from the pipeline while it trains.  Collective."""
        own: Any = self
        self._rows = len(next(iter(inputs.values())))
        if self.pipe is None:
            plain: tuple[Any, Any, Any] = super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, ignore_keys
            )
            return plain
        inputs = own._prepare_inputs(inputs)
        labels = {name: inputs[name] for name in own.label_names if inputs.get(name) is not None}
        counted = self._counted(inputs, own._get_num_items_in_batch([inputs], own.args.device))
        loss = self.pipe.eval_loss(counted).detach() if labels else None
        if prediction_loss_only:
            return loss, None, None
        outputs = self.pipe.predict({name: value for name, value in inputs.items() if name not in labels})
        ignored = set(ignore_keys or ()) | set(getattr(own.model.config, "keys_to_ignore_at_inference", ()))
        found = [value for name, value in outputs.items() if name not in ignored]
        told = list(labels.values())
        return loss, found[0] if len(found) == 1 else tuple(found), told[0] if len(told) == 1 else tuple(told) or None

    def _own_rows(self, found: Any, *args: Any, **kwargs: Any) -> Any:
        """Return results of the batch that was evaluated last, as all ranks have them; the trainer repeats its loss for
        as many rows as a full batch has."""
        return tree_map(lambda value: value[: self._rows], found)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model from rank 0.  Collective."""
        if self.pipe is not None:
            self.pipe.sync_model()
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        self._leave()
        super()._load_best_model()  # type: ignore[misc]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own: Any = self
        assert self.pipe is not None
        self.pipe.save(Path(output_dir) / STATE, _plain(own.optimizer), own.lr_scheduler, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        own: Any = self
        if checkpoint is None:
            return
        if not os.path.isdir(Path(checkpoint) / STATE):
            raise _refused(
                f"{checkpoint} is a checkpoint of a plain Trainer",
                "its optimizer state is of a single process",
                "start from its weights: from_pretrained",
            )
        assert self.pipe is not None
        self.pipe.load(Path(checkpoint) / STATE, _plain(own.optimizer), own.lr_scheduler)


class _Trained:
    """What the loop of the trainer may do with the model that it trains."""

    def __init__(self, pipe: Pipe | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self.train, self.eval, self.zero_grad = pipe.train, pipe.eval, pipe.zero_grad
        self.parameters, self.named_parameters = pipe.parameters, pipe.named_parameters

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the sums of replicas add up over the steps of an accumulation."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model that a pipeline trains has no {name!r}; use trainer.model or trainer.pipe")


class _WholeBatches(DataLoader[Any]):
    """A loader whose sampler knows the epoch, as that of Accelerate does."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler the epoch."""
        sampler: Any = getattr(self.batch_sampler, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _whole_batches(loader: Any) -> DataLoader[Any]:
    """Return a loader of the batches that Accelerate's loader divides among the ranks."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise _refused("a streamed dataset", "ranks could read different batches", "pass a dataset with a length")
    batches = loader.batch_sampler
    return _WholeBatches(
        loader.dataset,
        batch_sampler=getattr(batches, "batch_sampler", batches),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _require_possible(trainer: Any) -> None:
    """Raise UsageError for settings that a pipeline cannot follow."""
    args = trainer.args
    if not type(trainer).compute_loss.__module__.startswith("transformers."):
        raise _refused("compute_loss is overridden", "the loss is computed inside the pipeline", _LOSS)
    if trainer.compute_loss_func is not None:
        raise _refused("compute_loss_func is given", "the loss is computed inside the pipeline", _LOSS)
    if trainer.label_smoother is not None:
        raise _refused("label_smoothing_factor is set", "the loss is computed inside the pipeline", _LOSS)
    if args.fp16:
        raise _refused("fp16 is set", "the scale of the loss belongs to the pipeline there", "use bf16=True")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise _refused("DeepSpeed or FSDP is set", "they shard the model too", "drop it: the plan shares memory")
    if args.n_gpu > 1:
        raise _refused("one process sees several GPUs", "a rank of the pipeline has one", "start it with torchrun")
    if args.auto_find_batch_size:
        raise _refused("auto_find_batch_size is set", "the plan is made to fit the memory", "drop it")


_LOSS = "let forward() return the loss for labels"


def _refused(what: str, why: str, fix: str) -> UsageError:
    return UsageError(f"a Trainer on a pipeline: {what}", why=why, fix=fix)

"""transformers' `Trainer` on a pipeline: a mixin that overrides the methods which run a step.

    class PipelineTrainer(PipelineMixin, Trainer): ...
    trainer = PipelineTrainer(model=model, args=args, train_dataset=data, pipeline={"stages": 2})

A callback of `Trainer` sees steps and cannot run them, so the smallest place for a pipeline is a subclass.  Every rank
reads the same whole batches, in the order of a single process.  Steps, evaluation and prediction run in the pipeline;
the model on each rank has the newest weights of that rank's stage alone, and all of them before it is saved and at the
end of `train`.  What other classes override runs too, or is refused (`trainer_parts`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from autopart.api import compile as compile_pipe
from autopart.integrations.trainer_parts import PipelineModel, first_batch, refused, require_possible, undivided
from autopart.pipe.pipe import Pipe

STATE = "autopart"
"""Folder in a checkpoint of the trainer that has weights and optimizer state of all ranks."""
_Trainer: Any = object
"""What the mixin stands in front of, for type checkers."""


class PipelineMixin(_Trainer):  # type: ignore[misc]
    """Runs the steps of a `transformers.Trainer` as a pipeline.  Write it before the trainer class.

    pipeline: keyword arguments of `autopart.compile` besides the model and the sample; "cluster" too.  The attribute of
    this name counts where a class in front of the mixin takes no such argument.  Start the script with torchrun.  While
    `train` runs, `pipe` is the running pipeline; it is planned for the first batch.  After `train` the model on every
    rank has the trained weights.

    A class in front of the mixin may override any method that it passes on to `super()`.  Raises UsageError, where the
    class or the trainer is made or before its first step, for what a pipeline cannot do: a loss outside of the model,
    settings that docs/trainer.md does not list, methods behind the mixin that would never run, streamed datasets.
    """

    pipe: Pipe | None = None
    pipeline: dict[str, Any] | None = None
    model: Any
    gather_function: Any
    _model: PipelineModel
    _used: tuple[Any, dict[str, int]] = (None, {})
    """The optimizer of the `train` before, and this rank's parameters in it."""
    _stepped = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(PipelineMixin)]
        if any((kind.__module__, kind.__name__) == ("transformers.trainer", "Trainer") for kind in before):
            names = [kind.__name__ for kind in cls.__bases__ if not issubclass(kind, PipelineMixin)]
            raise refused(
                f"{cls.__name__} has PipelineMixin behind Trainer",
                "no method of the mixin would run",
                f"class {cls.__name__}({', '.join([*names[:1], 'PipelineMixin', 'Trainer'])})",
            )

    def __init__(self, *args: Any, pipeline: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._pipeline = dict(pipeline or self.pipeline or {})
        super().__init__(*args, **kwargs)
        require_possible(self, PipelineMixin, REPLACED)
        self.args.average_tokens_across_devices = False  # all ranks have the same tokens

    # -- training --------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the pipeline at the end, with the trained weights in the model of every rank.

        A second call goes on with the optimizer of the first one, as it does without a pipeline."""
        passed = self.optimizer is not None and self.optimizer is not self._used[0]
        if passed or (self.lr_scheduler is not None and self._used[0] is None):
            raise refused(
                "an optimizer was passed" if passed else "a scheduler was passed",
                "it has parameters of other ranks",
                'name it (optim="adamw_torch"), or override create_optimizer and create_scheduler',
            )
        try:
            result = super().train(*args, **kwargs)
        except BaseException:
            if self.pipe is not None:
                self._leave(sync=False)
            raise
        self._leave()
        return result

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the model for the first batch, then run the trainer's loop."""
        loader = undivided(self.get_train_dataloader())
        sample = first_batch(loader, self._prepare_inputs)
        sample = self._counted(sample, self._get_num_items_in_batch([sample], self.args.device))
        options = {"precision": "bf16" if self.args.bf16 else None, **self._pipeline}
        if self.args.torch_compile:
            options.setdefault("backend", "inductor")
        self.pipe = compile_pipe(self.model, options.pop("cluster", None), sample=sample, **options)
        self._model = PipelineModel(self.pipe, self.args.device)
        self._stepped = False
        return super()._inner_training_loop(*args, **kwargs)

    def _leave(self, *, sync: bool = True) -> None:
        """Bring all weights to the model of this rank, and end the pipeline.  Collective."""
        if self.pipe is not None:
            self._used = self.optimizer, self._parameters()
            self.pipe.close(sync=sync)
            self.pipe = None
            self.model_wrapped = self.model

    def _parameters(self) -> dict[str, int]:
        assert self.pipe is not None
        return {name: id(parameter) for name, parameter in self.pipe.named_parameters() if parameter.numel()}

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> Any:
        """Count the batches of a single process."""
        return super().set_initial_training_values(args, undivided(dataloader), *more)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer of this rank's parameters: `self.model` has these alone meanwhile."""
        whole, self.model = self.model, self._model
        empty = next(self._model.parameters())  # where a rank has no parameters, each pipe has another one for it
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["params"] = [one if one.numel() else empty for one in group["params"]]
        try:
            return super().create_optimizer()
        finally:
            self.model = whole

    def get_decay_parameter_names(self, model: Any) -> Any:
        """Return the names of the parameters that decay; the modules of the whole model decide."""
        assert self.pipe is not None
        return super().get_decay_parameter_names(self.pipe.model)

    def _require_own_parameters(self) -> None:
        """Raise UsageError if this rank's optimizer has parameters that this rank does not train, or the optimizer of
        the `train` before lacks some."""
        optimizer, before = self._used
        mine = self._parameters()
        driven = {id(one) for group in self.optimizer.param_groups for one in group["params"] if one.numel()}
        if not driven <= set(mine.values()) or (self.optimizer is optimizer and before != mine):
            raise refused(
                "the optimizer has other parameters than this rank trains",
                f"{_home(self, 'create_optimizer')}.create_optimizer took them elsewhere than from self.model, or a "
                "train() before had another plan",
                "take them from self.model.named_parameters() there; before a second train() with another plan, set "
                "trainer.optimizer = None, and pass resume_from_checkpoint= to keep its state",
            )

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a step of the pipeline; return its loss as the trainer counts it, with its share of the accumulation."""
        if self.pipe is None:
            what = f"_inner_training_loop is overridden in {_home(self, '_inner_training_loop')}"
            raise refused(what, "the model is compiled there", "call super()._inner_training_loop(...)")
        if not self._stepped:
            self._require_own_parameters()
        self.pipe.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._counted(self._prepare_inputs(inputs), num_items_in_batch)
        divided = getattr(self, "loss_is_scaled_for_ga", None)
        if divided is None:
            divided = "num_items_in_batch" in inputs
        share = 1.0 if divided else 1.0 / self.current_gradient_accumulation_steps
        loss = self.pipe.step(inputs, scale=share if share != 1.0 else None)
        self._stepped = True
        scaled: torch.Tensor = loss.detach() * share
        return scaled

    def _counted(self, inputs: dict[str, Any], items: Any) -> dict[str, Any]:
        """Return the inputs with the number of labels by which the model divides its loss, as the trainer passes it.

        What a model does with that number is its own: most divide a sum of losses by it, some ignore it.
        """
        if items is None or not self.model_accepts_loss_kwargs:
            return inputs
        return {**inputs, "num_items_in_batch": items}

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return model if self.pipe is None else self._model

    def _clip_grad_norm(self, model: Any) -> Any:
        assert self.pipe is not None
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        assert self.pipe is not None
        if not self._stepped:
            raise refused(
                f"{_home(self, 'training_step')}.training_step ran no step of the pipeline for an update",
                "a gradient that it computes itself is of this rank's copy of the model",
                "call super().training_step(model, inputs, num_items_in_batch)",
            )
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- what all ranks have alike -----------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of an update: all ranks work on the same batch."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return this rank's share: the trainer adds up those of all ranks, which have the same batch."""
        return super().floating_point_ops(inputs) / max(1, self.args.world_size)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // max(1, self.args.world_size)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate whole batches on every rank, so that there is nothing to gather."""
        # the loop sets its function back at its end
        self.gather_function = _all if self.gather_function == self.accelerator.gather else self._gathered
        if self.pipe is not None and _home(self, "prediction_step") != "transformers.Trainer":
            self.pipe.sync_model()  # what is overridden may use self.model, as generation does
        return super().evaluation_loop(undivided(dataloader), *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """Return loss, outputs and labels of a batch, from the pipeline while it trains.  Collective."""
        if self.pipe is not None:
            labelled = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
            self._model.loss_only = bool(prediction_loss_only) and labelled
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def _gathered(self, found: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what all ranks have, cut as the results of a single process: the trainer repeats the loss of the
        last batch for as many rows as a full one has."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return found
        return tree_map(lambda value: value[: state.remainder], found)

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model from rank 0.  Collective."""
        if self.pipe is not None:
            self.pipe.sync_model()
        super().save_model(output_dir, _internal_call)

    def _load_best_model(self) -> None:
        self._leave()
        super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.pipe is not None
        self.pipe.save(Path(output_dir) / STATE, _plain(self.optimizer), self.lr_scheduler, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if os.path.isdir(Path(checkpoint) / STATE):
            assert self.pipe is not None
            self.pipe.load(Path(checkpoint) / STATE, _plain(self.optimizer), self.lr_scheduler)
        elif os.path.exists(Path(checkpoint) / "optimizer.pt"):
            raise refused(
                f"{checkpoint} is a checkpoint of a plain Trainer",
                "its optimizer state is of a single process",
                "start from its weights: from_pretrained",
            )  # of a model alone (save_only_model) there is nothing to load, without a pipeline neither

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            name = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else "rng_state.pth"
            saved = [Path(checkpoint) / one for one in (name, "rng_state.pth", "rng_state_0.pth")]
            first = next((path for path in saved if path.exists()), saved[0])
            if first is not saved[0]:  # of another number of ranks, which all drew the same
                shutil.copyfile(first, saved[0])
        super()._load_rng_state(checkpoint)


REPLACED = (
    "training_step",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_wrap_model",
    "get_total_train_batch_size",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
"""Methods of the mixin that do not call those of the classes behind it."""


def _home(trainer: Any, method: str) -> str:
    """Return the name of the first class that has a method, besides the mixin."""
    kind = next(kind for kind in type(trainer).__mro__ if kind is not PipelineMixin and method in vars(kind))
    return "transformers.Trainer" if kind.__module__ == "transformers.trainer" else kind.__name__


def _all(found: Any) -> Any:
    """Return results as all ranks have them."""
    return found


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)

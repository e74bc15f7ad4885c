"""What a subclass of Trainer overrides runs on a pipeline as it does without one, or is refused by method and class.

Every method of the installed Trainer is overridden, in front of the mixin and behind it: a method that a later release
adds is one more draw.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from support.trainer_runs import ONE, Watched, both, differs, left, made
from transformers import Seq2SeqTrainer, Trainer

from autopart.integrations.trainer import REPLACED, PipelineMixin
from autopart.integrations.trainer_parts import LEFT_OUT
from autopart.ir.errors import UsageError

METHODS = sorted(n for n, one in vars(Trainer).items() if inspect.isfunction(one) and not n.startswith("__"))
ONCE_MORE = {"get_train_dataloader", "_get_dataloader", "_get_train_sampler", "_get_collator_with_removed_columns",
             "_set_signature_columns_if_needed", "_prepare_inputs", "_prepare_input",
             "_get_num_items_in_batch"}  # fmt: skip
"""What planning for the first batch calls once more."""
OF_ONE_PROCESS = {"_has_mixed_mesh_grads", "_mixed_mesh_grad_norm", "get_tp_size", "get_cp_size", "get_sp_size"}
"""Asked of other ways to divide a model, which are refused."""
RUN = {"max_steps": 3, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1,
       "save_strategy": "best", "metric_for_best_model": "loss", "load_best_model_at_end": True}  # fmt: skip


def counting(base: type, methods: list[str], calls: Counter[str], in_front: bool = False) -> type:
    """Return a class that counts calls of methods and passes them on; in front, a class without a Trainer behind it."""

    def counted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(super(made_class, self), name)(*args, **kwargs)

        return method

    made_class: type = type("Counting", (object,) if in_front else (base,), {name: counted(name) for name in methods})
    return made_class


@pytest.mark.parametrize("in_front", [False, True])
def test_every_method_that_is_overridden_runs_or_is_refused(tmp_path, in_front):
    refused = set(LEFT_OUT if in_front else (*LEFT_OUT, *REPLACED))
    for name in refused & set(METHODS):
        mine = counting(Watched, [name], Counter())
        kind = type("Piped", (mine, PipelineMixin, Watched) if in_front else (PipelineMixin, mine), {})
        with pytest.raises(UsageError, match=f"{name} is overridden in Counting"):
            made(kind, tmp_path)
    kept = [name for name in METHODS if name not in refused]
    plain, piped = Counter[str](), Counter[str]()
    mine = counting(Watched, kept, piped, in_front)
    expected, found = both(
        tmp_path,
        RUN,
        (
            counting(Watched, kept, plain),
            type("Piped", (mine, PipelineMixin, Watched) if in_front else (PipelineMixin, mine), {"pipeline": ONE}),
        ),
    )
    assert differs(found, expected) == []
    assert plain["create_optimizer"] == 1 and plain["prediction_step"] > 1
    for name in plain.keys() - OF_ONE_PROCESS:
        assert piped[name] >= plain[name] if name in ONCE_MORE else piped[name] == plain[name], name


def test_the_methods_that_are_never_called_are_known_for_this_release():
    for name in REPLACED:
        called = set(getattr(Trainer, name).__code__.co_names) & set(METHODS)
        still = set(getattr(PipelineMixin, name).__code__.co_names)
        rest = called - still - set(LEFT_OUT) - OF_ONE_PROCESS - ONCE_MORE
        assert rest <= {"_get_learning_rate"}, (name, rest)  # which the trainer's loop calls too


class Flipping(Trainer):
    """Trains on other tokens than it is given, and takes the arguments of a Trainer alone."""

    def __init__(self, model: Any = None, args: Any = None, train_dataset: Any = None, **more: Any) -> None:
        super().__init__(model=model, args=args, train_dataset=train_dataset, **more)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, {**inputs, "input_ids": inputs["input_ids"].flip(0)}, num_items_in_batch)


def test_the_advice_for_an_overridden_step_can_be_followed(tmp_path):
    class Behind(PipelineMixin, Flipping):
        pipeline = ONE

    with pytest.raises(UsageError, match=r"class Behind\(Flipping, PipelineMixin, Trainer\)"):
        made(Behind, tmp_path)

    class InFront(Flipping, PipelineMixin, Trainer):
        pipeline = ONE

    expected, found = both(tmp_path, {"max_steps": 2}, (Flipping, InFront))
    assert differs(found, expected) == []


def test_a_mixin_behind_the_trainer_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"class Late\(Flipping, PipelineMixin, Trainer\)"):

        class Late(Flipping, PipelineMixin):
            pass

    class Early(Flipping, PipelineMixin, Trainer):
        pass


class OwnStep:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(**inputs)["loss"]


class OwnGradient:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.model(**inputs)["loss"]
        loss.backward()
        return loss.detach()


class OwnLoop:
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return self.training_step(self.model, {"input_ids": torch.ones(4, 6, dtype=torch.long)})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OwnStep, "the model is called in a training step"),
        (OwnGradient, "OwnGradient.training_step ran no step of the pipeline"),
        (OwnLoop, "_inner_training_loop is overridden in OwnLoop"),
    ],
)
def test_what_passes_the_pipeline_by_is_refused_before_an_update(tmp_path, kind, said):
    trainer = made(type("Piped", (kind, PipelineMixin, Trainer), {"pipeline": ONE}), tmp_path, {"max_steps": 1})
    before = trainer.model.head.weight.clone()
    with pytest.raises(UsageError, match=said):
        trainer.train()
    assert torch.equal(trainer.model.head.weight, before)


class Schedulefree(torch.optim.SGD):
    """Counts what a schedule-free optimizer needs to be told."""

    trained = evaluated = 0

    def train(self) -> None:
        self.trained += 1

    def eval(self) -> None:
        self.evaluated += 1


class OwnOptimizer(Watched):
    loss_is_scaled_for_ga = False

    def create_optimizer(self) -> Any:  # as before a model was an argument
        if self.optimizer is None:
            decay = self.get_decay_parameter_names(self.model)
            groups: list[list[Any]] = [[], []]
            for name, one in self.model.named_parameters():
                groups[name in decay].append(one)
            self.optimizer = Schedulefree([{"params": groups[0]}, {"params": groups[1], "lr": 0.3}], lr=0.1)
        return self.optimizer


class OwnFactory(Watched):
    def create_optimizer(self, model: Any = None) -> Any:
        found = super().create_optimizer(model)
        found.param_groups[0]["weight_decay"] = 0.5
        return found

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2)
        return self.lr_scheduler


@pytest.mark.parametrize("kind", [OwnOptimizer, OwnFactory])
def test_optimizers_of_subclasses_have_the_parameters_of_this_rank(tmp_path, kind):
    args = {"max_steps": 3, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    expected, found = both(tmp_path, args, (kind, type("Piped", (PipelineMixin, kind), {"pipeline": ONE})))
    assert differs(found, expected) == []


def test_an_optimizer_of_other_parameters_is_refused_before_the_first_step(tmp_path):
    class Foreign(PipelineMixin, Watched):
        pipeline = ONE

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
            return self.optimizer

    with pytest.raises(UsageError, match=r"Foreign\.create_optimizer took them elsewhere"):
        made(Foreign, tmp_path).train()


def test_a_scheduler_that_is_passed_is_refused(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(UsageError, match="a scheduler was passed"):
        made(type("Piped", (PipelineMixin, Watched), {}), tmp_path, optimizers=(None, scheduler)).train()


def test_a_trainer_that_evaluates_by_generation_sees_the_newest_weights(tmp_path):
    """Its own prediction step runs, with the whole model at its newest weights."""

    class Norms(Seq2SeqTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            self.__dict__.setdefault("norms", []).append(sum(p.norm().item() for p in self.model.parameters()))
            return super().prediction_step(*args, **kwargs)

    found = []
    for kind in (Norms, type("Piped", (PipelineMixin, Norms), {"pipeline": ONE})):
        trainer = made(kind, tmp_path, {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1})
        trainer.train()
        found.append({**left(trainer), "norms": trainer.norms})
    assert differs(found[1], found[0]) == []

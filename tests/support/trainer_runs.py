"""Runs of a plain Trainer and of one on a pipeline that differ in nothing else, and everything that a run leaves."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autopart.integrations.trainer import PipelineMixin

TOKENS, WORDS = 6, 13
TIMES = ("_runtime", "_per_second", "preparation_time", "_mem_")
"""Parts of the names of what is measured: it differs from run to run."""


class TinyConfig(PretrainedConfig):
    model_type = "tiny_for_trainer"
    width = 8


class Tiny(PreTrainedModel):
    """Two layers with a loss as a language model has it: the sum divided by the number of labels that it is told."""

    config_class = TinyConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(WORDS, config.width)
        self.inner = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, WORDS)
        self.drop = nn.Dropout(getattr(config, "dropout", 0.0))
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **more: Any
    ) -> dict[str, torch.Tensor]:
        hidden = self.drop(torch.tanh(self.inner(self.embed(input_ids))))
        logits = self.head(self.norm(hidden))
        if labels is None:
            return {"logits": logits}
        how = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch, "logits": logits}


class Lines(Dataset[dict[str, Any]]):
    """Rows of words, each one different; some labels are ignored."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, WORDS, (rows, TOKENS), generator=draw)
        self.ids[:, 0] = torch.arange(rows) % WORDS
        self.labels = self.ids.clone()
        self.labels[torch.rand(rows, TOKENS, generator=draw) < 0.3] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index], "length": int(self.ids[index].sum())}


class Events(TrainerCallback):
    """Notes which callbacks came, in order, with the step and the rate at that moment."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args: Any, state: Any, control: Any, **more: Any) -> None:
            optimizer = more.get("optimizer")
            rate = optimizer.param_groups[0]["lr"] if optimizer is not None else None
            self.seen.append((name, state.global_step, round(state.epoch or 0, 6), rate))

        return note


class Watched(Trainer):
    """A plain Trainer that notes its batches."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_batch_samples(*args, **kwargs)
        self.__dict__.setdefault("batches", []).append([batch["input_ids"].tolist() for batch in found[0]])
        return found


ONE = {"cluster": "cpu:1", "micro_batches": 2}


class Piped(PipelineMixin, Watched):
    pipeline = ONE


def model(dropout: float = 0.0) -> Tiny:
    torch.manual_seed(0)
    return Tiny(TinyConfig(dropout=dropout))


def settings(folder: Path, kind: type = TrainingArguments, **more: Any) -> Any:
    known: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "save_strategy": "no", "num_train_epochs": 2,
        "learning_rate": 1e-2, "optim": "adamw_torch", "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(**{**known, **more})


def accuracy(found: Any, compute_result: bool = True) -> dict[str, float]:
    """Return figures of predictions that see each of them."""
    guess, truth = (found[0], found[1])
    if isinstance(guess, list):  # of batches
        guess, truth = numpy.concatenate(guess), numpy.concatenate(truth)
    return {"right": float((numpy.asarray(guess).argmax(-1) == numpy.asarray(truth)).mean())}


def made(kind: type, folder: Path, args: Mapping[str, Any] | None = None, rows: int = 10, **more: Any) -> Any:
    """Return a trainer of a kind, with the same model and data for every kind."""
    events = Events()
    arguments = Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments
    given = {"model": model(), "train_dataset": Lines(rows), "eval_dataset": Lines(7, seed=1), **more}
    given["callbacks"] = [events, *given.get("callbacks", ())]
    trainer = kind(args=settings(folder, arguments, **(args or {})), **given)
    trainer.events = events
    return trainer


def left(trainer: Any) -> dict[str, Any]:
    """Return what a run left: history, batches, callbacks, optimizer, scheduler, weights, random numbers, files."""
    names = {id(one): name for name, one in trainer.model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    folder = Path(trainer.args.output_dir)
    state = trainer.state
    best = Path(state.best_model_checkpoint).name if state.best_model_checkpoint else None
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group, whole in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = sorted(names[id(one)] for one in whole["params"] if one.numel())
    files = [str(path.relative_to(folder)) for path in folder.glob("checkpoint-*/*.safetensors")]
    return {
        "history": [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in state.log_history],
        "batches": trainer.__dict__.get("batches", []),
        "callbacks": trainer.events.seen,
        "optimizer": groups,
        "moments": {names[id(one)]: copy.deepcopy(kept) for one, kept in optimizer.state.items() if one.numel()},
        "scheduler": {k: v for k, v in trainer.lr_scheduler.state_dict().items() if k != "lr_lambdas"},
        "weights": copy.deepcopy(dict(trainer.model.state_dict())),
        "random": [torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]],
        "state": [state.global_step, state.epoch, state.max_steps, state.num_train_epochs, state.total_flos,
                  state.num_input_tokens_seen, state.best_metric, state.best_global_step, best],
        "files": sorted(files),
    }  # fmt: skip


def differs(found: Any, expected: Any, place: str = "", near: float = 1e-5) -> list[str]:
    """Return where two results differ: floats nearly, all else exactly."""
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or found.keys() != expected.keys():
            return [f"{place}: {sorted(map(str, found))} for {sorted(map(str, expected))}"]
        return [one for key in expected for one in differs(found[key], expected[key], f"{place}.{key}", near)]
    if isinstance(expected, torch.Tensor):
        same = found.shape == expected.shape and torch.allclose(found.double(), expected.double(), rtol=near, atol=near)
        return [] if same else [f"{place}: tensors differ"]
    if isinstance(expected, numpy.ndarray):
        return differs(torch.as_tensor(found), torch.as_tensor(expected), place, near)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        if len(found) != len(expected):
            return [f"{place}: {len(found)} for {len(expected)} entries: {found} for {expected}"[:300]]
        pairs = enumerate(zip(found, expected, strict=True))
        return [one for i, (mine, plain) in pairs for one in differs(mine, plain, f"{place}[{i}]", near)]
    if isinstance(expected, float) and not isinstance(expected, bool) and found is not None:
        return (
            []
            if found == expected or abs(found - expected) <= near * max(1.0, abs(expected))
            else [f"{place}: {found} for {expected}"]
        )
    return [] if found == expected else [f"{place}: {found!r} for {expected!r}"]


class Stop(TrainerCallback):
    """Ends a run after some steps, without a word, as a kill does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(kind: Any, folder: Path, args: Mapping[str, Any], at: int) -> Any:
    """Return the trainer of a run that was ended after step `at`, and resumed from its last checkpoint, if any."""
    with suppress(KeyboardInterrupt):
        made(kind, folder, args, rows=11, callbacks=[Stop(at)]).train()
        raise AssertionError(f"the run did not come to step {at}")
    trainer = made(kind, folder, args, rows=11)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return trainer


def resumable(draw: random.Random) -> dict[str, Any]:
    """Return arguments of a run of several epochs with a checkpoint every few steps."""
    how = {
        "num_train_epochs": draw.choice([2, 3, 2.5]),
        "gradient_accumulation_steps": draw.choice([1, 1, 2]),
        "save_strategy": "steps",
        "save_steps": draw.choice([1, 2, 3]),
        "ignore_data_skip": draw.random() < 0.2,
        "train_sampling_strategy": draw.choice(["random", "random", "sequential", "group_by_length"]),
        "dataloader_drop_last": draw.random() < 0.3,
        "per_device_train_batch_size": draw.choice([2, 3, 4]),
        "data_seed": draw.choice([None, 3]),
        "lr_scheduler_type": draw.choice(["linear", "cosine", "constant_with_warmup"]),
    }
    if draw.random() < 0.2:
        how |= {"dataloader_num_workers": 1, "dataloader_prefetch_factor": draw.choice([1, 3])}
    if draw.random() < 0.3:
        how["max_steps"] = 5
    return how


def both(folder: Path, args: Mapping[str, Any] | None = None, kinds: Any = (Watched, Piped), **more: Any) -> list[Any]:
    """Run both kinds; return what each left, or the error of the plain one twice."""
    found = []
    for kind in kinds:
        shutil.rmtree(folder / "run", ignore_errors=True)
        trainer = made(kind, folder / "run", args, **more)
        trainer.train()
        found.append(left(trainer))
    return found

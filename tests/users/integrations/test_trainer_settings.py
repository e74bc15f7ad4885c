"""Every field of TrainingArguments is compared with a plain Trainer, or refused by name, or stated on the page."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from support.trainer_runs import Piped, Watched, accuracy, differs, left, made, settings
from transformers import EarlyStoppingCallback, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from autopart.integrations.trainer import PipelineMixin
from autopart.integrations.trainer_parts import KNOWN
from autopart.integrations.trainer_parts import VALUES as SOME
from autopart.ir.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")
PAGE = Path(__file__).parents[3] / "docs" / "trainer.md"
EVERY = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {**EVERY, "metric_for_best_model": "right", "save_strategy": "steps", "save_steps": 2}
VALUES: dict[str, list[dict[str, Any]]] = {
    "per_device_train_batch_size": [{"per_device_train_batch_size": n} for n in (2, 3, 16)],
    "num_train_epochs": [{"num_train_epochs": n} for n in (1, 1.5, 3)],
    "max_steps": [{"max_steps": n} for n in (1, 4, 7)],
    "learning_rate": [{"learning_rate": 0.1}],
    "lr_scheduler_type": [
        *({"lr_scheduler_type": n} for n in ("cosine", "constant", "polynomial", "inverse_sqrt")),
        {"lr_scheduler_type": "reduce_lr_on_plateau", **BEST, "lr_scheduler_kwargs": {"patience": 0}},
    ],
    "lr_scheduler_kwargs": [{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}],
    "warmup_steps": [{"warmup_steps": 2}, {"warmup_steps": 0.5}],
    "optim": [{"optim": n} for n in SOME["optim"]],
    "optim_args": [{"optim": "sgd", "optim_args": "momentum=0.9"}],
    "weight_decay": [{"weight_decay": 0.3}],
    "adam_beta1": [{"adam_beta1": 0.5}],
    "adam_beta2": [{"adam_beta2": 0.9}],
    "adam_epsilon": [{"adam_epsilon": 1e-2}],
    "gradient_accumulation_steps": [{"gradient_accumulation_steps": n} for n in (2, 3)],
    "max_grad_norm": [{"max_grad_norm": n} for n in (0.0, 0.1)],
    "activation_checkpointing": [{"activation_checkpointing": True}],
    "activation_checkpointing_kwargs": [
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    ],
    "gradient_checkpointing": [{"gradient_checkpointing": True}],
    "gradient_checkpointing_kwargs": [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    ],
    "logging_strategy": [{"logging_strategy": n} for n in ("no", "epoch")],
    "logging_steps": [{"logging_steps": 2}, {"logging_steps": 0.4}],
    "logging_first_step": [{"logging_first_step": True, "logging_steps": 3}],
    "logging_nan_inf_filter": [{"logging_nan_inf_filter": False}],
    "include_num_input_tokens_seen": [{"include_num_input_tokens_seen": n} for n in ("all", "non_padding")],
    "eval_strategy": [{"eval_strategy": n} for n in ("steps", "epoch")],
    "eval_steps": [EVERY],
    "eval_delay": [{**EVERY, "eval_delay": 3}],
    "per_device_eval_batch_size": [{**EVERY, "per_device_eval_batch_size": n} for n in (2, 3, 8)],
    "prediction_loss_only": [{**EVERY, "prediction_loss_only": True}],
    "eval_on_start": [{"eval_on_start": True, **EVERY}],
    "eval_do_concat_batches": [{**EVERY, "eval_do_concat_batches": False}],
    "eval_use_gather_object": [{**EVERY, "eval_use_gather_object": True}],
    "eval_accumulation_steps": [{**EVERY, "eval_accumulation_steps": 1}],
    "include_for_metrics": [{**EVERY, "include_for_metrics": ["inputs", "loss"]}],
    "batch_eval_metrics": [{**EVERY, "batch_eval_metrics": True}],
    "save_only_model": [{"save_strategy": "epoch", "save_only_model": True}],
    "save_strategy": [{"save_strategy": "epoch"}, {**BEST, "save_strategy": "best"}],
    "save_steps": [{"save_strategy": "steps", "save_steps": 2}],
    "save_total_limit": [{"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}],
    "load_best_model_at_end": [{**BEST, "load_best_model_at_end": True, "learning_rate": 0.5}],
    "metric_for_best_model": [{**BEST, "metric_for_best_model": "loss"}],
    "greater_is_better": [{**BEST, "greater_is_better": False}],
    "dataloader_drop_last": [{"dataloader_drop_last": True}],
    "dataloader_num_workers": [{"dataloader_num_workers": 2}],
    "dataloader_pin_memory": [{"dataloader_pin_memory": True}],
    "dataloader_persistent_workers": [{**EVERY, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}],
    "dataloader_prefetch_factor": [{"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3}],
    "dataloader_multiprocessing_context": [
        {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
    ],
    "dataloader_in_order": [{"dataloader_in_order": False}],
    "remove_unused_columns": [{"remove_unused_columns": True}],
    "label_names": [{**EVERY, "label_names": ["labels"]}],
    "train_sampling_strategy": [{"train_sampling_strategy": n} for n in SOME["train_sampling_strategy"]],
    "length_column_name": [{"train_sampling_strategy": "group_by_length", "length_column_name": "length"}],
    "seed": [{"seed": 7}],
    "data_seed": [{"data_seed": 7}],
    "accelerator_config": [{"accelerator_config": {n: n == "non_blocking"}} for n in ("even_batches", "non_blocking")],
    "ignore_data_skip": [{"ignore_data_skip": True}],
    "restore_callback_states_from_checkpoint": [{"restore_callback_states_from_checkpoint": True}],
}  # fmt: skip
SLOWLY = {
    "bf16": [{"bf16": True, **EVERY}],
    "bf16_full_eval": [{"bf16_full_eval": True, **EVERY}],
    "fp16_full_eval": [{"fp16_full_eval": True, **EVERY}],
    "torch_compile": [{"torch_compile": True, "max_steps": 2}],
    "full_determinism": [{"full_determinism": True}],
}
"""Settings that are compared one by one only: they are rounded, or change this process."""


_STATED = """
    output_dir use_cpu average_tokens_across_devices tf32 torch_compile_backend torch_empty_cache_steps
    log_on_each_node log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id save_on_each_node push_to_hub hub_token hub_private_repo
    hub_model_id hub_strategy hub_always_push hub_revision ddp_find_unused_parameters ddp_bucket_cap_mb
    ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank
"""
STATED = set(_STATED.split())
"""Settings of what is around a run, or of what a pipeline replaces: the page states their effect."""


def compare(folder: Path, args: dict[str, Any], near: float = 1e-5) -> None:
    """Compare a run, an evaluation and a prediction after it; what a plain Trainer refuses counts for nothing."""
    found = []
    for kind in (Watched, Piped):
        shutil.rmtree(folder / "run", ignore_errors=True)
        try:
            trainer = made(kind, folder / "run", args, compute_metrics=accuracy, callbacks=[*stopping(args)])
            trainer.train()
        except (ValueError, KeyError, TypeError, RuntimeError):  # TypeError: of a scheduler without a drawn argument
            if kind is Watched:
                return
            raise
        run = left(trainer)
        trainer.evaluate()
        predicted = trainer.predict(made(Watched, folder / "other").train_dataset)
        found.append({**run, "after": left(trainer)["history"], "predicted": predicted.predictions})
    if found[0]["predicted"] is not None and not isinstance(found[0]["predicted"], list):
        shapes = [one.pop("predicted") for one in found]
        assert shapes[0].shape == shapes[1].shape and abs(shapes[0] - shapes[1]).max() < max(near, 1e-4) * 10, args
    assert differs(found[1], found[0], near=near) == [], args


def stopping(args: dict[str, Any]) -> Any:
    best = args.get("load_best_model_at_end") and args.get("eval_strategy") == args.get("save_strategy")
    return [EarlyStoppingCallback(1)] if best else []


def combined(draw: random.Random) -> dict[str, Any]:
    """Return some settings together."""
    args: dict[str, Any] = {}
    for name in draw.sample(sorted(VALUES), 6):
        args |= draw.choice(VALUES[name])
    return args


def test_settings_that_the_page_supports_do_together_what_they_do_without_a_pipeline(tmp_path):
    args = combined(random.Random(0))
    compare(tmp_path, {name: value for name, value in args.items() if not name.startswith("dataloader_")})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 64))
def test_many_settings_do_together_what_they_do_without_a_pipeline(tmp_path, seed):
    compare(tmp_path, combined(random.Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VALUES))
def test_each_setting_that_the_page_supports_does_what_it_does_without_a_pipeline(tmp_path, name):
    for args in VALUES[name]:
        compare(tmp_path, args)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOWLY))
def test_settings_of_precision_and_of_the_process_do_nearly_what_they_do_without_a_pipeline(tmp_path, name):
    try:
        for args in SLOWLY[name]:
            compare(tmp_path, args, near=0.05 if name != "full_determinism" else 1e-5)
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_setting_is_compared_or_stated_on_the_page_or_refused_by_name(tmp_path):
    page = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    generation = {name for name in KNOWN if name.startswith("gener") or name == "predict_with_generate"}
    assert KNOWN - fields == generation and KNOWN | SOME.keys() <= page
    assert VALUES.keys() | SLOWLY.keys() == (KNOWN | SOME.keys()) - generation - STATED
    for name in sorted(fields - KNOWN):
        trainer = made(Trainer, tmp_path)
        setattr(trainer.args, name, object())
        with pytest.raises(UsageError, match=f"{name} is set"):
            again(trainer)


def again(trainer: Any) -> None:
    """Ask what a pipeline cannot do, as where a trainer is made."""
    from autopart.integrations.trainer_parts import require_possible

    trainer.__class__ = type("Piped", (PipelineMixin, Trainer), {})
    require_possible(trainer, PipelineMixin, ())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"optim": "lomo"}, "optim is set to 'lomo'"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches of accelerator_config is set"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler of accelerator_config is set"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy is set to 'batch_rebalance'"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is set"),
        ({"debug": "underflow_overflow"}, "debug is set"),
    ],
)
def test_values_that_no_test_compares_are_refused(tmp_path, args, said):
    with pytest.raises(UsageError, match=said):
        made(Piped, tmp_path, args)


def test_a_setting_of_a_later_release_is_refused_and_one_of_the_users_own_is_not(tmp_path):
    @dataclasses.dataclass
    class Later(TrainingArguments):
        rotate_batches: bool = False

    for module, refused in (("transformers.later", True), (__name__, False)):
        Later.__module__ = module
        trainer = made(Trainer, tmp_path)
        trainer.args = settings(tmp_path, Later, rotate_batches=True)
        if refused:
            with pytest.raises(UsageError, match="rotate_batches is set"):
                again(trainer)
        else:
            again(trainer)
    trainer.args = settings(tmp_path, Seq2SeqTrainingArguments, predict_with_generate=True)
    again(trainer)

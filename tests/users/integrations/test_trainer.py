"""A `Trainer` script as a pipeline: losses, norms, evaluation, checkpoints and weights of the plain script.

The Trainer needs accelerate (`pip install "autopart[trainer]"`); without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from autopart.ir.errors import UsageError

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from transformers import Trainer, TrainingArguments

from autopart.integrations.trainer import PipelineMixin

ROOT = Path(__file__).parents[3]
SIZES = ["--epochs", "2", "--lines", "40", "--rows", "4", "--tokens", "16", "--layers", "2", "--width", "32"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class PipelineTrainer(PipelineMixin, Trainer):
    pass


def run(words: list[str], out: Path, *more: str) -> list[dict[str, float]]:
    """Run a script of `examples/`; return what its trainer logged."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOPART_CACHE": str(out.parent)}
    done = subprocess.run(
        [sys.executable, *words, "--out", str(out), *SIZES, *more],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, float]] = json.loads((out / "history.json").read_text())
    return found


def assert_same_history(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) and sum("eval_loss" in entry for entry in expected) == 2
    for mine, plain in zip(found, expected, strict=True):
        names = plain.keys() & {"loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step"}
        assert names and {name: mine[name] for name in names} == pytest.approx({n: plain[n] for n in names}, rel=1e-5)


@pytest.mark.slow
def test_a_script_has_the_losses_evaluation_and_weights_of_the_plain_one_and_resumes(tmp_path):
    plain = run([str(ROOT / "examples/trainer_plain.py")], tmp_path / "plain")
    script = [*TORCHRUN, str(ROOT / "examples/trainer_pipeline.py")]
    piped = run(script, tmp_path / "piped")
    assert_same_history(piped, plain)
    checkpoint = min((tmp_path / "piped").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    resumed = run(script, tmp_path / "again", "--resume", str(checkpoint))
    assert_same_history(resumed, plain)
    expected = load_file(tmp_path / "plain/end/model.safetensors")
    for kind in ("piped", "again"):
        found = load_file(tmp_path / kind / "end/model.safetensors")
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.allclose(found[name], weight, rtol=1e-4, atol=1e-6), (kind, name)


def model() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def made(
    tmp_path: Path, kind: type = PipelineTrainer, *, args: dict[str, object] | None = None, **more: object
) -> Trainer:
    settings = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **(args or {}))
    return kind(model=model(), args=settings, train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}] * 4, **more)


class WithOwnLoss(PipelineTrainer):
    def compute_loss(self, *args, **kwargs):
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "args", "more", "said"),
    [
        (WithOwnLoss, {}, {}, "compute_loss is overridden"),
        (PipelineTrainer, {}, {"compute_loss_func": lambda *args: None}, "compute_loss_func is given"),
        (PipelineTrainer, {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor is set"),
        (PipelineTrainer, {"auto_find_batch_size": True}, {}, "auto_find_batch_size is set"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(tmp_path, kind, args, more, said):
    with pytest.raises(UsageError, match=said):
        made(tmp_path, kind, args=args, **more)


def test_an_optimizer_that_is_passed_is_refused(tmp_path):
    trainer = made(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="an optimizer was passed"):
        trainer.train()


def test_options_are_read_as_those_of_compile(tmp_path):
    with pytest.raises(UsageError, match="num_stages"):
        made(tmp_path, pipeline={"num_stages": 2}).train()


def counted_models() -> dict[str, torch.nn.Module]:
    """Models that treat the number of labels differently: one whose labels the Trainer counts before they are shifted,
    and one that takes the number and ignores it."""
    gpt2 = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    bert = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return {
        "shifted": transformers.GPT2LMHeadModel(gpt2),
        "ignored": transformers.BertForSequenceClassification(bert),
    }


@pytest.mark.parametrize("kind", ["shifted", "ignored"])
def test_losses_and_norms_are_divided_as_the_plain_trainer_divides_them(tmp_path, kind):
    torch.manual_seed(1)
    ids = torch.randint(16, (11, 6))
    data = [{"input_ids": row, "labels": row if kind == "shifted" else row[0] % 2} for row in ids]
    settings = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=3,
        gradient_accumulation_steps=2, per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="no",
    )  # fmt: skip
    found = []
    for type_, more in ((Trainer, {}), (PipelineTrainer, {"pipeline": {"cluster": "cpu:1", "micro_batches": 2}})):
        trainer = type_(model=counted_models()[kind], args=settings, train_dataset=data, eval_dataset=data[:5], **more)
        trainer.train()
        found.append(trainer.state.log_history)
    for plain, mine in zip(*found, strict=True):
        names = plain.keys() & {"loss", "grad_norm", "eval_loss"}
        assert {name: mine[name] for name in names} == pytest.approx({n: plain[n] for n in names}, rel=1e-5)

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

ROOT = Path(__file__).parents[2]
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

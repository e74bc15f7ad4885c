"""Train a small Llama to continue lines of the standard library, with transformers' Trainer, in one process.

    python examples/trainer_plain.py --out runs/plain

Started again, it goes on from its last checkpoint.  trainer_pipeline.py is this script over several processes; `diff`
shows what changes.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

FIRST = 1  # id of byte 0; 0 is padding


def lines(count: int, tokens: int) -> list[dict[str, list[int]]]:
    """Return lines as ids of one length; padding has no labels."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    found = []
    for line in [line.strip() for line in text.splitlines() if len(line.strip()) > 8][:count]:
        ids = [FIRST + byte for byte in line.encode()[:tokens]]
        padding = tokens - len(ids)
        found.append({"input_ids": ids + [0] * padding, "labels": ids + [-100] * padding})
    return found


def build(layers: int, width: int, tokens: int) -> Any:
    """Return a Llama with the same weights at every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=FIRST + 256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=tokens, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def settings(args: argparse.Namespace) -> TrainingArguments:
    """Return what the Trainer is told: accumulation, clipping, a cosine, evaluation and a checkpoint each epoch."""
    return TrainingArguments(
        output_dir=str(args.out), num_train_epochs=args.epochs, per_device_train_batch_size=args.rows,
        per_device_eval_batch_size=args.rows, gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.01,
        max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=2, logging_steps=1, eval_strategy="epoch",
        save_strategy="epoch", use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
    )  # fmt: skip


def train(args: argparse.Namespace) -> None:
    data = lines(args.lines, args.tokens)
    trainer = Trainer(
        model=build(args.layers, args.width, args.tokens),
        args=settings(args),
        train_dataset=data[args.lines // 8 :],
        eval_dataset=data[: args.lines // 8],
    )
    last = get_last_checkpoint(args.out) if args.out.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(args.out / "end"))
    if trainer.is_world_process_zero():
        (args.out / "history.json").write_text(json.dumps(trainer.state.log_history))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Llama on lines of the standard library.")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and of the trained model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch; two batches make an update")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())

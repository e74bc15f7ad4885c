"""Train LoRA adapters of a small Llama on lines of the standard library with peft, over processes.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 --local-ranks-filter 0 \
        examples/lora_pipeline.py --checkpoint runs/lora --out adapters

lora_plain.py is this script in one process; `diff` shows what changes.  Every rank prints the same lines, and
--local-ranks-filter shows those of rank 0.  When a rank dies, all are started again and go on from the last epoch.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader

import autopart

TOKENS = 32
Batch = dict[str, torch.Tensor]


def samples(count: int) -> list[torch.Tensor]:
    """Return pieces of a module of the standard library as bytes."""
    data = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()[: count * TOKENS]
    return list(torch.tensor(list(data)).view(-1, TOKENS))


def collate(rows: list[torch.Tensor]) -> Batch:
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def base(width: int, layers: int) -> Any:
    """Return a Llama with the same weights at every call."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=2 * width, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(args: argparse.Namespace) -> None:
    data = samples(args.samples)
    loader = DataLoader(data, batch_size=args.rows, shuffle=True, collate_fn=collate)

    model = base(args.width, args.layers)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    model.train()
    model = autopart.compile(model, sample=collate(data[: args.rows]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, eps=1e-6)

    first = model.load(args.checkpoint, optimizer, missing_ok=True) or 0

    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # so that the order of an epoch is the same after a restart
        for number, batch in enumerate(loader, start=1):
            loss = model.step(batch)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {epoch * len(loader) + number} loss {loss.item():.8f}", flush=True)
        model.save(args.checkpoint, optimizer, extra=epoch + 1, keep=2)

    model.save_pretrained(args.out)
    merged = PeftModel.from_pretrained(base(args.width, args.layers), args.out).merge_and_unload()
    with torch.no_grad():
        print(f"merged: loss {merged(**collate(data[: args.rows])).loss.item():.6f}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train LoRA adapters of a Llama on the standard library.")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="what to write while training, and to go on from"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapters")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())

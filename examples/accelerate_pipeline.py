"""Fine-tune the BERT of fine_tune_plain.py with a loop for Hugging Face Accelerate, over processes.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        examples/accelerate_pipeline.py --checkpoint runs/accelerated --out bert

accelerate_plain.py is this script in one process; `diff` shows what changes.  When a rank dies, all are started again
and go on from the last epoch; the variable lets Accelerate connect again.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from accelerate import Accelerator
from fine_tune_plain import arguments, build, collate, lines_of_modules
from torch.utils.data import DataLoader

import autopart


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator()
    samples = lines_of_modules(args.lines)
    held_back, samples = samples[::8], [sample for place, sample in enumerate(samples) if place % 8]
    loader = DataLoader(samples, batch_size=args.rows, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(held_back, batch_size=args.rows, collate_fn=collate)

    model = build(args.width, args.layers).train()
    model = autopart.compile(model, sample=collate(samples[: args.rows]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, args.epochs * len(loader))

    first = model.load(args.checkpoint, optimizer, scheduler, missing_ok=True) or 0

    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # so that the order of an epoch is the same after a restart
        for number, batch in enumerate(loader, start=1):
            loss = model.step(batch)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.print(f"step {epoch * len(loader) + number} loss {loss.item():.8f}", flush=True)

        model.eval()
        right = 0
        for batch in test_loader:
            labels = batch.pop("labels")
            with torch.no_grad():
                logits = model.predict(**batch).logits
            right += int((logits.argmax(1) == labels).sum())
        model.train()
        accelerator.print(f"epoch {epoch + 1}: {right} of {len(held_back)} right", flush=True)
        model.save(args.checkpoint, optimizer, scheduler, epoch + 1, keep=2)

    model.save_pretrained(args.out)


if __name__ == "__main__":
    train(arguments())

"""Fine-tune the BERT of fine_tune_plain.py with a loop for Hugging Face Accelerate, in one process.

    python examples/accelerate_plain.py --checkpoint runs/accelerated --out bert

Started again, it goes on from the last epoch.  accelerate_pipeline.py is this script over several processes; `diff`
shows what changes.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from accelerate import Accelerator
from fine_tune_plain import arguments, build, collate, lines_of_modules
from torch.utils.data import DataLoader


def train(args: argparse.Namespace) -> None:
    accelerator = Accelerator()
    samples = lines_of_modules(args.lines)
    held_back, samples = samples[::8], [sample for place, sample in enumerate(samples) if place % 8]
    loader = DataLoader(samples, batch_size=args.rows, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(held_back, batch_size=args.rows, collate_fn=collate)

    model = build(args.width, args.layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, args.epochs * len(loader))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader, test_loader = accelerator.prepare(loader, test_loader)

    first = len(list(args.checkpoint.glob("epoch-*")))
    if first:
        accelerator.load_state(args.checkpoint / f"epoch-{first}")

    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # so that the order of an epoch is the same after a restart
        for number, batch in enumerate(loader, start=1):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.print(f"step {epoch * len(loader) + number} loss {loss.item():.8f}", flush=True)

        model.eval()
        right = 0
        for batch in test_loader:
            labels = batch.pop("labels")
            with torch.no_grad():
                logits = model(**batch).logits
            guesses, labels = accelerator.gather_for_metrics((logits.argmax(1), labels))
            right += int((guesses == labels).sum())
        model.train()
        accelerator.print(f"epoch {epoch + 1}: {right} of {len(held_back)} right", flush=True)
        accelerator.save_state(args.checkpoint / f"epoch-{epoch + 1}")

    accelerator.unwrap_model(model).save_pretrained(args.out)


if __name__ == "__main__":
    train(arguments())

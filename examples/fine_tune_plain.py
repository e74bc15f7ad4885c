"""Fine-tune a small BERT to tell from which module of the standard library a line of code comes, in one process.

    python examples/fine_tune_plain.py --checkpoint runs/bert.pt --out bert

Batches have other lengths, and the last one fewer rows; the accuracy is measured after every epoch, and the model is
written with `save_pretrained`.  Started again, it goes on from the last epoch.  The model has random weights, since
nothing is downloaded: put `from_pretrained` where it is made.  fine_tune_pipeline.py is this script over several
processes; `diff` shows what changes.
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
from torch.utils.data import DataLoader

MODULES = ("argparse.py", "decimal.py", "tarfile.py", "typing.py")
PAD, FIRST = 0, 1  # ids: padding, then the bytes

Sample = tuple[torch.Tensor, int]
Batch = dict[str, torch.Tensor]


def lines_of_modules(count: int) -> list[Sample]:
    """Return lines of each module as ids, with the number of the module."""
    found: list[Sample] = []
    for label, name in enumerate(MODULES):
        lines = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text().splitlines()
        lines = [line.strip() for line in lines if len(line.strip()) > 8][:count]
        found += [(torch.tensor([FIRST + byte for byte in line.encode()[:62]]), label) for line in lines]
    return found


def collate(samples: list[Sample]) -> Batch:
    """Pad to the longest line of the batch, and that to a multiple of 16."""
    longest = max(len(ids) for ids, _ in samples)
    length = -(-longest // 16) * 16
    ids = torch.full((len(samples), length), PAD)
    for row, (line, _) in zip(ids, samples, strict=True):
        row[: len(line)] = line
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def build(width: int, layers: int) -> Any:
    """Return a BERT without dropout, with the same weights at every call."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=FIRST + 256, hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=64, num_labels=len(MODULES),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def train(args: argparse.Namespace) -> None:
    samples = lines_of_modules(args.lines)
    held_back, samples = samples[::8], [sample for place, sample in enumerate(samples) if place % 8]
    loader = DataLoader(samples, batch_size=args.rows, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(held_back, batch_size=args.rows, collate_fn=collate)

    model = build(args.width, args.layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, args.epochs * len(loader))

    first = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"]

    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # so that the order of an epoch is the same after a restart
        for number, batch in enumerate(loader, start=1):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(f"step {epoch * len(loader) + number} loss {loss.item():.8f}", flush=True)

        model.eval()
        right = 0
        for batch in test_loader:
            labels = batch.pop("labels")
            with torch.no_grad():
                logits = model(**batch).logits
            right += int((logits.argmax(1) == labels).sum())
        model.train()
        print(f"epoch {epoch + 1}: {right} of {len(held_back)} right", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}, args.checkpoint)

    model.save_pretrained(args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a BERT on lines of the standard library.")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="what to write while training, and to go on from"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lines", type=int, default=400, help="lines of each module")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())

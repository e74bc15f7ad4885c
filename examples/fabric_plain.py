"""Train the GPT of gpt_plain.py with a loop for Lightning Fabric, in one process.

    python examples/fabric_plain.py --checkpoint runs/fabric.ckpt --out gpt.pt

Started again, it goes on from its last checkpoint.  fabric_pipeline.py is this script over several processes; `diff`
shows what changes.
"""

from __future__ import annotations

import argparse

import torch
from gpt_plain import GPT, arguments, library_bytes, windows
from lightning_fabric import Fabric


def train(args: argparse.Namespace) -> None:
    text = library_bytes()
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(args.seed)

    model = GPT(args.layers, args.width, args.heads, args.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer = fabric.setup(model, optimizer)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if args.checkpoint.exists():
        fabric.load(args.checkpoint, state)

    while state["step"] < args.steps:
        total = 0.0
        for part in range(args.accumulate):
            ids, targets = windows(text, args.rows, args.tokens, state["step"] * args.accumulate + part)
            loss = model(ids, targets)
            fabric.backward(loss / args.accumulate)
            total += loss.item() / args.accumulate
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        fabric.print(f"step {state['step']} loss {total:.8f}", flush=True)
        if state["step"] % args.every == 0:
            fabric.save(args.checkpoint, state)

    if fabric.is_global_zero:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    train(arguments())

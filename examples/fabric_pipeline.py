"""Train the GPT of gpt_plain.py with a loop for Lightning Fabric, over processes.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fabric_pipeline.py \
        --checkpoint runs/fabric --out gpt.pt

fabric_plain.py is this script in one process; `diff` shows what changes.  When a rank dies, all are started again and
go on from the last checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from gpt_plain import GPT, arguments, library_bytes, windows
from lightning_fabric import Fabric

import autopart
from autopart.integrations.fabric import PipelineStrategy


def train(args: argparse.Namespace) -> None:
    text = library_bytes()
    strategy = PipelineStrategy(sample=windows(text, args.rows, args.tokens, 0))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(args.seed)

    model = GPT(args.layers, args.width, args.heads, args.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model, optimizer = fabric.setup(model, optimizer)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if autopart.latest(args.checkpoint):
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

    fabric.strategy.teardown()  # every rank's model gets all trained values
    if fabric.is_global_zero:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    train(arguments())

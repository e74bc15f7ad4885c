"""Train a GPT that is written by hand on the source files of the standard library, over two processes.

    python examples/gpt_pipeline.py --checkpoint runs/gpt --out gpt.pt

gpt_plain.py is this script in one process; `diff` shows what changes.  When a process dies, all are started again and
go on from the last checkpoint, and so does a new start.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import autopart

BYTES = 256


class Block(nn.Module):
    """A layer: causal attention, then two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        shape = (rows, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_again(x))))


class GPT(nn.Module):
    """A GPT over bytes, whose head shares the weight of the embedding."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(BYTES, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def library_bytes(limit: int = 1_000_000) -> torch.Tensor:
    """Read the first bytes of the standard library's modules, sorted by name."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= limit:
            break
    return torch.frombuffer(found[:limit], dtype=torch.uint8).long()


def windows(text: torch.Tensor, rows: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces of the text, and for each byte the next one."""
    starts = torch.randint(len(text) - tokens, (rows, 1), generator=torch.Generator().manual_seed(seed))
    places = starts + torch.arange(tokens)
    return text[places], text[places + 1]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    text = library_bytes()
    text, kept_back = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = GPT(args.layers, args.width, args.heads, args.tokens)
    model = autopart.compile(model, sample=windows(text, args.rows, args.tokens, 0))

    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    step = model.load(args.checkpoint, optimizer, scheduler, missing_ok=True) or 0

    while step < args.steps:
        total = 0.0
        for part in range(args.accumulate):
            ids, targets = windows(text, args.rows, args.tokens, step * args.accumulate + part)
            loss = model.step(ids, targets, scale=1 / args.accumulate)
            total += loss.item() / args.accumulate
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        line = f"step {step} loss {total:.8f} norm {norm:.3f} rate {scheduler.get_last_lr()[0]:.2e}"
        if step % args.every == 0:
            model.eval()
            with torch.no_grad():
                loss = model.eval_loss(*windows(kept_back, args.rows, args.tokens, 0))
            model.train()
            line += f" evaluated {loss:.8f}"
            model.save(args.checkpoint, optimizer, scheduler, step, keep=2)
        if model.is_main:
            print(line, flush=True)

    state = model.state_dict()
    if model.is_main:
        torch.save(state, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT on the standard library's source files.")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="what to write while training, and to go on from"
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the trained weights")
    parser.add_argument("--steps", type=int, default=300, help="steps of the optimizer")
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations and checkpoints")
    parser.add_argument("--accumulate", type=int, default=2, help="batches for one step of the optimizer")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=64, help="bytes of a row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    autopart.launch(train, "cpu:2", arguments(), restarts=3)

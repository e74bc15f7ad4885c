"""Fit a deep network to noisy samples of a function over several hosts, any of which may be stopped at any time.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST0:29500 \\
        examples/preempted_pipeline.py --checkpoint /shared/runs/preempted

SIGTERM to one rank or one torchrun makes all ranks save after the same step and end.  Started again, on the same
number of processes or another one, the run goes on with the next batch.  preempted_plain.py is this script in one
process; `diff` shows what changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autopart

INPUTS = 8


class Residual(nn.Module):
    """Two linear layers, added to what they were given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network(width: int, depth: int) -> nn.Module:
    """Return a network from points to values, with the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, 1))


def sampled(count: int) -> TensorDataset:
    """Return noisy values of a smooth function at random points."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(count, INPUTS, generator=generator)
    values = torch.sin(points.sum(1, keepdim=True)) + points[:, :1] * points[:, 1:2]
    return TensorDataset(points, values + 0.1 * torch.randn(values.shape, generator=generator))


def train(args: argparse.Namespace) -> None:
    data = sampled(args.samples)
    net, loss_fn = network(args.width, args.depth), nn.MSELoss()
    net = autopart.compile(net, sample=data[: args.rows], loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    net.load(args.checkpoint, optimizer, scheduler, missing_ok=True)
    loader = DataLoader(data, batch_sampler=net.sampler(data, args.rows, shuffle=False))

    def save() -> None:
        net.save(args.checkpoint, optimizer, scheduler, keep=2)

    while loader.batch_sampler.epoch < args.epochs and not net.stop_requested:
        for points, values in loader:
            loss = net.step(points, values)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(f"step {net.steps} loss {loss.item():.8f}", flush=True)
            if net.stop_requested:
                break
            if net.steps % args.every == 0:
                save()

    save()
    print(f"saved after step {net.steps}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit a deep network in a run that may be stopped at any time.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="what to write, and to go on from")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())

"""Fit a deep network to noisy samples of a function in one process, which may be stopped at any time.

    python examples/preempted_plain.py --checkpoint runs/preempted.pt

SIGTERM saves and ends the run.  Started again, it goes on with the next batch, in the middle of an epoch too.
preempted_pipeline.py is this script over several hosts; `diff` shows what changes.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

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
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))

    step = epoch = done = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step, epoch, done = state["step"], state["epoch"], state["done"]

    def save() -> None:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "step": step, "epoch": epoch, "done": done}, args.checkpoint)

    while epoch < args.epochs and not stops:
        loader = DataLoader(Subset(data, range(done, len(data))), batch_size=args.rows)
        for points, values in loader:
            loss = loss_fn(net(points), values)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step, done = step + 1, done + len(points)
            epoch, done = (epoch + 1, 0) if done == len(data) else (epoch, done)
            print(f"step {step} loss {loss.item():.8f}", flush=True)
            if stops:
                break
            if step % args.every == 0:
                save()

    save()
    print(f"saved after step {step}", flush=True)


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

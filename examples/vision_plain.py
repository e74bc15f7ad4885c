"""Train a small residual network with MixUp on drawn shapes, and average its weights, in one process.

    python examples/vision_plain.py --checkpoint runs/vision.pt

The network has batch normalisation, and the averaged weights (EMA) are evaluated after every epoch.  Started again, it
goes on from the last epoch.  vision_pipeline.py is this script over several processes; `diff` shows what changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


class Residual(nn.Module):
    """Two convolutions with batch normalisation, added to what they were given."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm, self.norm_again = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm_again(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(found + self.shortcut(x))


def network(width: int, blocks: int) -> nn.Module:
    """Return a network for images of one channel, with the same weights at every call."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    body = [Residual(width, width, 1) for _ in range(blocks)] + [Residual(width, 2 * width, 2)]
    body += [Residual(2 * width, 2 * width, 1) for _ in range(blocks)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES))


def drawn(count: int, seed: int, size: int = 16) -> TensorDataset:
    """Draw noisy disks, squares, rings and crosses at random places."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    middle = 5 + 6 * torch.rand(count, 2, 1, 1, generator=generator)
    radius = 2.5 + 2 * torch.rand(count, 1, 1, generator=generator)
    places = torch.arange(size, dtype=torch.float32)
    x, y = (places[None, None, :] - middle[:, 0]).abs(), (places[None, :, None] - middle[:, 1]).abs()
    far = (x**2 + y**2).sqrt()
    shapes = (far < radius, torch.maximum(x, y) < radius, (far - radius).abs() < 1, torch.minimum(x, y) < 1)
    clean = torch.stack(shapes, 1)[torch.arange(count), labels].float()
    return TensorDataset((clean + 0.5 * torch.randn(clean.shape, generator=generator))[:, None], labels)


def mix(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the MixUp of a batch: each image with another one, and both labels (Zhang et al. 2018)."""
    share, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(images))
    targets = F.one_hot(labels, CLASSES).float()
    return torch.lerp(images[order], images, share), torch.lerp(targets[order], targets, share)


def train(args: argparse.Namespace) -> None:
    data, test = drawn(args.images, seed=0), drawn(args.images // 4, seed=1)
    loader = DataLoader(data, batch_size=args.rows, shuffle=True, drop_last=True)
    test_loader = DataLoader(test, batch_size=args.rows)

    net, loss_fn = network(args.width, args.blocks), nn.CrossEntropyLoss()
    averaged = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(args.decay))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * len(loader))

    first = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["model"])
        averaged.load_state_dict(state["averaged"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["epoch"]

    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # order and MixUp of an epoch are the same after a restart
        for number, (images, labels) in enumerate(loader, start=1):
            images, targets = mix(images, labels)
            loss = loss_fn(net(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            averaged.update_parameters(net)
            print(f"step {epoch * len(loader) + number} loss {loss.item():.8f}", flush=True)

        averaged.eval()
        with torch.no_grad():
            right = sum(int((averaged(images).argmax(1) == labels).sum()) for images, labels in test_loader)
        print(f"epoch {epoch + 1}: {right} of {len(test)} right", flush=True)
        state = {"model": net.state_dict(), "averaged": averaged.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}, args.checkpoint)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a residual network with MixUp and averaged weights.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="what to write, and to go on from")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--decay", type=float, default=0.9, help="of the averages")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())

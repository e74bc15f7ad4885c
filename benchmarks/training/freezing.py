"""Fine-tuning that freezes layers, really run: a small ViT on 4 CPU ranks, ten epochs of scikit-learn's digits.

    pip install scikit-learn
    python -m benchmarks.training.freezing         about 12 minutes on 2 cores; writes results/freezing.json

The model first learns five of the ten digits, in one process. Then three ways to learn all ten, 3 seeds each, in turn:
"none" freezes nothing; "freeze" freezes layers by the closed form of PipeTransformer (alpha = 1/3) under the plan of
the first epoch; "replan" also plans anew after each freeze. A rank has 60 % of the memory that a replica of the whole
model needs, so the first plan is a pipeline. The same freezing in one process, in plain PyTorch, gives
the accuracy to compare with. Seconds of an epoch are those of its steps, and of `replan` where there is one. That takes
a few seconds whatever the length of an epoch, and an epoch of this data set takes four: so seconds without it are
listed, too. The four ranks share the cores of the machine, so the work of all counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

import autopart
from autopart.extras.freezing.policies import closed_form
from autopart.files.clusters import parse_cluster
from benchmarks.shared.common import ratio, spread, write

WAYS = ("none", "freeze", "replan")
LAYERS, WIDTH, ROWS, EPOCHS, ALPHA, SHARE = 8, 128, 64, 10, 1 / 3, 0.6
LEARNED = 5
"""Digits that the model knows before."""
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Run:
    """One training. seconds: of each epoch; replanning: those of them in which another plan was looked for and adopted;
    accuracy: on what was kept back; plans: of each epoch, in a line."""

    seconds: list[float]
    replanning: list[float]
    accuracy: float
    plans: list[str]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pictures, 8 x 8, and their labels, in a fixed order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(digits.target)[order]


def model(seed: int) -> nn.Module:
    """Return a ViT without dropout."""
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).train()


def batches(images: torch.Tensor, labels: torch.Tensor, epoch: int) -> list[dict[str, torch.Tensor]]:
    """Return the batches of an epoch, all of the same size."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    cut = [order[first : first + ROWS] for first in range(0, len(order) - ROWS + 1, ROWS)]
    return [{"pixel_values": images[rows], "labels": labels[rows]} for rows in cut]


def accuracy(predict: Callable[..., Any], images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return which part of the pictures is recognised; those beyond the last whole batch are left out."""
    own = zip(images.split(ROWS), labels.split(ROWS), strict=True)
    right = [predict(pixel_values=part).logits.argmax(-1) == known for part, known in own if len(part) == ROWS]
    return torch.cat(right).float().mean().item()


def limited() -> autopart.Cluster:
    """Return four ranks of a CPU whose memory does not hold a replica of the whole model and its batch."""
    images, labels = data()
    cluster = parse_cluster("cpu:4")
    whole = autopart.plan(
        model(0), cluster, sample=batches(images, labels, 0)[0], stages=1, replicas=4, optimizer="adamw",
        recompute="off", costs="analytic",
    )  # fmt: skip
    memory = int(SHARE * max(estimate.peak_bytes for estimate in whole.estimates))
    return replace(cluster, devices=tuple(replace(device, memory_bytes=memory) for device in cluster.devices))


def learned(seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of a model that has learned the first digits, in this process."""
    images, labels = data()
    kept, whole = len(images) // 5, model(seed)
    known = labels[kept:] < LEARNED
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for batch in batches(images[kept:][known], labels[kept:][known], epoch):
            whole(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return whole.state_dict()


def restored(seed: int, weights: dict[str, torch.Tensor]) -> nn.Module:
    """Return a model with these weights."""
    whole = model(seed)
    whole.load_state_dict(weights)
    return whole


def train(way: str, seed: int, weights: dict[str, torch.Tensor], cluster: autopart.Cluster) -> Run:
    """Train on this rank."""
    torch.set_num_threads(1)
    images, labels = data()
    kept = len(images) // 5
    seconds, plans, replanning = [], [], []
    policy = autopart.freeze.PipeTransformer(ALPHA, gradients=False)
    sample = batches(images[kept:], labels[kept:], 0)[0]
    with autopart.compile(restored(seed, weights), cluster, sample=sample, optimizer="adamw", recompute="off") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)
        for epoch in range(EPOCHS):
            own = batches(images[kept:], labels[kept:], epoch)
            began = time.perf_counter()
            replanning.append(0.0)
            if way != "none" and policy.apply(pipe, epoch) and way == "replan":
                found = pipe.replan(optimizer, steps=(EPOCHS - epoch) * len(own))
                replanning[-1] = found.planning_s + found.took_s
            for batch in own:
                pipe.step(batch)
                optimizer.step()
                optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
            widths = "+".join(str(len(stage.ranks)) for stage in pipe.plan.stages)
            plans.append(f"{widths} ranks, {len(pipe.plan.micro_rows)} micro-batches, {pipe.plan.schedule}")
        pipe.eval()
        reached = accuracy(pipe.predict, images[:kept], labels[:kept])
    return Run(seconds, replanning, reached, plans)


def plain(seed: int, weights: dict[str, torch.Tensor]) -> float:
    """Train in one process with the same freezing; return the accuracy."""
    images, labels = data()
    kept, whole = len(images) // 5, restored(seed, weights)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        frozen = closed_form(LAYERS, ALPHA, epoch)
        for module in [whole.vit.embeddings, *whole.vit.layers[:frozen]] if frozen else []:
            module.requires_grad_(False)
        optimizer.zero_grad()
        for batch in batches(images[kept:], labels[kept:], epoch):
            whole(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    whole.eval()
    with torch.no_grad():
        return accuracy(whole, images[:kept], labels[:kept])


def main() -> None:
    """Read the command line, train, print and write the results."""
    parser = argparse.ArgumentParser(description="Training that freezes layers, on 4 CPU ranks.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print only")
    asked = parser.parse_args()
    cluster = limited()
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    alone = []
    for seed in range(asked.seeds):
        weights = learned(seed)
        for way in WAYS:
            runs[way].append(autopart.launch(train, cluster, way, seed, weights, cluster, timeout=900)[0])
            print(way, seed, f"{sum(runs[way][-1].seconds):.1f} s", runs[way][-1], flush=True)
        alone.append(plain(seed, weights))
        print("plain freezing", seed, f"{alone[-1]:.4f}", flush=True)
    totals = {way: [sum(run.seconds) for run in own] for way, own in runs.items()}
    steps = {way: [sum(run.seconds) - sum(run.replanning) for run in own] for way, own in runs.items()}
    found: dict[str, Any] = {
        "seconds": {way: spread(own) for way, own in totals.items()},
        "speed_up": {way: ratio(totals["none"], totals[way]) for way in WAYS},
        "speed_up_without_replanning": {way: ratio(steps["none"], steps[way]) for way in WAYS},
        "accuracy": {way: statistics.mean(run.accuracy for run in own) for way, own in runs.items()},
        "accuracy_of_plain_freezing": statistics.mean(alone),
        "spread_of_plain_freezing": max(alone) - min(alone),
        "runs": {way: [asdict(run) for run in own] for way, own in runs.items()},
    }
    for name in ("seconds", "speed_up", "speed_up_without_replanning", "accuracy"):
        for way in WAYS:
            print(f"{name:28s} {way:8s} {found[name][way]}")
    print("accuracy of plain freezing", alone)
    if not asked.no_record:
        print(f"wrote {write('freezing', found)}")


if __name__ == "__main__":
    main()

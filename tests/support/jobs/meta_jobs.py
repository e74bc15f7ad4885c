"""Models on the meta device that get their values in parts, compared with the same models built whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import autopart

ROWS = 8


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of the zoo, without dropout, and its batch."""
    from support.models.zoo import CASES

    case = CASES[name]
    return case.model(), case.data(ROWS)


def on_meta(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return the same model without values, and its batch."""
    with torch.device("meta"):
        model = built(name)[0]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model, built(name)[1]


def stepped(
    name: str,
    weights: str,
    options: Mapping[str, Any],
    world: int,
    folder: str = "",
    other: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Take training steps of a model from the meta device.

    Returns the loss and the gradients of the first, the state before it and after the optimizer's step, and this rank's
    buffers at first.  folder: where the pipe is saved after it.  other: options of a plan that a second step runs
    under, after which `again` is the loss in eval mode."""
    model, batch = on_meta(name)
    with autopart.compile(model, f"cpu:{world}", sample=batch, weights=weights, cache=False, **options) as pipe:
        state, buffers = pipe.state_dict(), {name: buffer.clone() for name, buffer in pipe.named_buffers()}
        loss, gradients = float(pipe.step(batch)), pipe.gradients()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        after, again = pipe.state_dict(), 0.0
        if folder:
            pipe.save(folder, optimizer)
        if other is not None:
            pipe.adopt(autopart.plan(built(name)[0], f"cpu:{world}", sample=batch, **other), optimizer)
            optimizer.zero_grad()
            pipe.step(batch)
            optimizer.step()
            again = float(pipe.eval_loss(batch))
    return {
        "loss": loss, "gradients": gradients, "state": state, "buffers": buffers, "after": after, "again": again
    }  # fmt: skip


def plain(name: str, state: Mapping[str, torch.Tensor], micros: int = 1) -> dict[str, Any]:
    """Take the same steps of the whole model with the values of a state, in one process, over so many micro-batches
    where batch statistics couple the rows."""
    model, batch = built(name)
    model.load_state_dict(dict(state))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micros):
            part = {k: v.chunk(micros)[micro] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            loss = model(**part).loss / micros
            loss.backward()
            total += loss.item()
        return total

    loss = step()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step()
    optimizer.step()
    with torch.no_grad():
        again = model.eval()(**batch).loss.item()
    return {"loss": loss, "gradients": gradients, "after": after, "buffers": buffers, "again": again}


def own_files(folder: str) -> str:
    """Compile on two ranks, each with the weights of its own folder; returns what is raised."""
    model, batch = on_meta("llama_tied")
    options = {"stages": 1, "replicas": 2, "micro_batches": 2, "costs": "analytic"}
    try:
        with autopart.compile(model, "cpu:2", sample=batch, weights=f"{folder}/{os.environ['RANK']}", **options):
            return ""
    except autopart.AutopartError as error:
        return str(error)

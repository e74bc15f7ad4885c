"""Steps of a pipeline over padded batches, compared with the plain model over the batches as they are."""

from __future__ import annotations

import copy

import torch

import autopart
from support.models.padded_models import Causal, Masked, pooled, tokens

Batch = dict[str, torch.Tensor]


def masked_batch(length: int) -> Batch:
    labels = tokens(length)
    labels[0, :2] = -100
    return {"input_ids": tokens(length), "labels": labels}


def causal_batch(length: int) -> Batch:
    return {"idx": tokens(length), "targets": tokens(length, seed=1)}


MODELS = {"masked": (Masked, masked_batch), "causal": (Causal, causal_batch)}


def compared(name: str, lengths: tuple[int, ...], to: tuple[int, ...]) -> tuple[float, set[tuple[int, ...]], int]:
    """Return the largest relative error of losses and gradients over batches of these lengths, the axes of tokens that
    were captured, and the captures of a second round.  Ranks that need no data are given none."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    worst, shapes = 0.0, set()
    with autopart.compile(
        model, "cpu:2", sample=batch(lengths[0]), stages=2, micro_batches=2, costs="analytic", pad_to=to
    ) as pipe:
        captures = pipe.session.captures
        for length in lengths:
            pipe.zero_grad()
            plain.zero_grad()
            loss = pipe.step(batch(length) if pipe.needs_data else None)
            expected = plain(**batch(length))
            expected.backward()
            pairs = [(loss, expected.detach()), (pipe.eval_loss(batch(length)), plain(**batch(length)).detach())]
            found = pipe.gradients()
            pairs += [(found[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None]
            worst = max([worst, *((a - b).norm() / b.norm().clamp(min=1e-6) for a, b in pairs if a is not None)])
        made = captures.made
        for length in lengths:
            pipe.step(batch(length))
            pipe.eval_loss(batch(length))
        for capture in captures.kept.values():
            shapes |= {value.shape[1:] for value in capture.graph.values if value.name in capture.graph.inputs}
        return float(worst), shapes, captures.made - made


def refused(length: int) -> list[str]:
    """Return what is said of a padded model that averages over positions: at once, and at a later step; then a batch
    that needs no padding runs."""
    said = []
    for first in (length, 8):
        try:
            with autopart.compile(
                Causal(pooled), "cpu:2", sample=causal_batch(first), stages=2, costs="analytic", pad_to=(8, 16)
            ) as pipe:
                try:
                    pipe.step(causal_batch(length))
                except autopart.RefusedError as error:
                    said.append(str(error))
                pipe.step(causal_batch(8))
        except autopart.RefusedError as error:
            said.append(str(error))
    return said


def outputs(length: int) -> tuple[int, ...]:
    """Return the shape of what a model returns for a batch that `step` would pad."""
    model, loss = torch.nn.Embedding(32, 5), torch.nn.CrossEntropyLoss()

    def loss_fn(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(found.flatten(0, 1), target.flatten())

    sample = tokens(8), tokens(8) % 5
    with autopart.compile(
        model, "cpu:2", loss_fn=loss_fn, sample=sample, costs="analytic", pad_to=(8, 16), pad_with={"input": 0}
    ) as pipe:
        pipe.step((tokens(length), tokens(length) % 5))
        return tuple(pipe.predict(tokens(length)).shape)

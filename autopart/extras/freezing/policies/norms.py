"""Norms of the gradients of layers, over all stages and replicas, as one process would compute them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopart.passes.graph.prefixes import Layer
from autopart.session.session import Session


def layer_norms(session: Session, layers: Sequence[Layer]) -> dict[str, float]:
    """Return the 2-norm of each layer's gradient, 0 without any.  Collective; equal on all ranks.

    Each parameter is counted on the rank that owns it, so replicas and tied copies count once; a parameter that two
    layers share counts in both.  Sends a number for each layer.
    """
    rank, owners = session.world.rank, session.standing.context.placement.owners
    squares = {
        name: float(torch.linalg.vector_norm(_dense(tensor.grad), dtype=torch.float64)) ** 2
        for name, tensor in session.tensors.driven.items()
        if tensor.grad is not None and owners.get(name) == rank
    }
    own = [math.fsum([squares[name] for name in layer.params if name in squares]) for layer in layers]
    rows = session.world.gather_numbers(own)
    sums = map(math.fsum, zip(*rows, strict=True))
    return {layer.name: math.sqrt(total) for layer, total in zip(layers, sums, strict=True)}


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()

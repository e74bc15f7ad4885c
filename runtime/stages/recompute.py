"""Activation checkpointing: of a group of ops only the inputs are kept until the backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from autopart.rng import current_key, micro_key


class RecomputedGroup(nn.Module):
    """Runs `body` in the forward, and again in the backward to compute what autograd needs."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return what `body` returns.  Random ops draw the same numbers both times: they use the key of the forward,
        since the backward may run in a thread of autograd or while another micro-batch's key is set."""
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        key = current_key()

        def run(*args: torch.Tensor) -> Any:
            with micro_key(*key):
                return self.body(*args)

        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)

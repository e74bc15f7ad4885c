"""Freezing layers while training goes on: policies that say which, from the norms of their gradients.

    policy = autopart.freeze.PipeTransformer(alpha=1 / 3)
    if policy.apply(pipe, epoch):
        pipe.replan(optimizer, steps=remaining)

A policy decides what freezes, since that changes the result of the training; what it saves is found by planning again.
May enter: a rule that was published, as a `Policy`.  What a prefix of a model is stands in `passes.graph.prefixes`.
"""

from autopart.freeze.pipe_transformer import PipeTransformer
from autopart.freeze.policy import Policy
from autopart.session.step.kept.activations import AutoCache

__all__ = ["AutoCache", "PipeTransformer", "Policy"]

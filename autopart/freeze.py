"""Freezing layers while training goes on, under the name that users import.

    policy = autopart.freeze.PipeTransformer(alpha=1 / 3)
    if policy.apply(pipe, epoch):
        pipe.replan(optimizer, steps=remaining)

A policy decides what freezes, since that changes the result of the training; what it saves is found by planning again.
"""

from autopart.extras.freezing.kept.activations import AutoCache
from autopart.extras.freezing.policies import PipeTransformer, Policy

__all__ = ["AutoCache", "PipeTransformer", "Policy"]

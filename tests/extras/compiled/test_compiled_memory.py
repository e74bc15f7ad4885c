"""Memory of compiled stages: what a plan says they keep for the backward, beside what autograd holds in a step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.models.zoo import CASES

import autopart

TOLERANCE = 0.05


class Held:
    """Bytes of storages that autograd holds, now and at most, without those at the given addresses."""

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._count: dict[int, int] = {}
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Count a saved tensor until it is released."""
        kept, storage = tensor.detach(), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._own:
            before = self._count.get(place, 0)
            self._count[place] = before + 1
            self.now += 0 if before else size
            self.most = max(self.most, self.now)
            weakref.finalize(kept, self._give, place, size)
        return kept

    def _give(self, place: int, size: int) -> None:
        self._count[place] -= 1
        self.now -= 0 if self._count[place] else size


def held_and_planned(name: str, recompute: Any) -> tuple[int, int]:
    """Return the bytes held at most in a step of one stage, and the plan's.  A recomputed group saves nothing that is
    seen from outside; the plan counts its inputs."""
    batch = CASES[name].data(8)
    with autopart.compile(
        CASES[name].model(), "cpu:1", sample=batch, micro_batches=2, recompute=recompute, backend="inductor",
    ) as pipe:  # fmt: skip
        assert pipe.plan.provenance.costs == "compiled", pipe.plan.notes
        given: Sequence[torch.Tensor] = (*pipe.session.tensors.held.values(), *batch.values())
        held = Held({tensor.untyped_storage().data_ptr() for tensor in given})
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept):
            pipe.step(batch)
        (estimate,) = pipe.plan.estimates
        return held.most, estimate.live * estimate.activation_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while its compiler is imported
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("gpt2", "off"), ("llama", "off"), ("gpt2", ("transformer.h.*",)), ("llama", ("model.layers.*",))],
)
def test_the_plan_says_what_compiled_stages_keep(name: str, recompute: Any) -> None:
    held, planned = held_and_planned(name, recompute)
    assert planned == pytest.approx(held, rel=TOLERANCE)

"""Which values go together: in the order of the forward, those of one owner, large ones alone."""

from __future__ import annotations

import torch

from autopart.runtime.stages.stage_module import awaited
from autopart.runtime.sums.shared_values import parts_of


def test_small_parameters_of_a_bucket_go_by_owner_and_type_and_large_ones_alone() -> None:
    megabyte = 1 << 18  # of single precision
    tensors = {name: torch.empty(megabyte // 4) for name in "abcdef"} | {"large": torch.empty(megabyte)}
    tensors["half"] = torch.empty(8, dtype=torch.bfloat16)
    owners = {"a": 0, "b": 1, "half": 0, "c": 0, "large": 0, "d": 0, "e": 1, "f": 0}
    found = list(parts_of(owners, tensors, 5 << 18))
    assert found == [["a", "c"], ["b"], ["half"], ["large"], ["d", "f"], ["e"]]


def test_what_is_not_under_way_is_there() -> None:
    parameter = torch.ones(2)
    assert awaited(parameter) is parameter

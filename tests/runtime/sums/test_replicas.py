"""Buckets of gradients: of one type, in the order of release, the first one small."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopart.runtime.sums.replicas import ALIGNED_BYTES, Bucket, ReplicaSums, Replicated, parts_of


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def kept_by_all(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int | None]]:
    return [(parameter, None) for parameter in parameters]


def test_the_first_bucket_is_small_and_the_others_are_full() -> None:
    megabyte = 1 << 18  # of single precision
    found = parts_of(kept_by_all(parameters(*[megabyte // 2] * 14)), 3 << 20)
    assert [len(inside) for inside, _ in found] == [2, 6, 6]


def test_a_bucket_holds_one_type_and_half_precision_is_summed_in_single() -> None:
    half, single = parameters(4, 4, dtype=torch.bfloat16), parameters(4)
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    found = parts_of(kept_by_all([half[0], single[0], frozen, half[1]]), 1 << 20)
    assert [[p.dtype for p in inside] for inside, _ in found] == [[torch.bfloat16] * 2, [torch.float32]]
    assert {Bucket.of(*part).flat.dtype for part in found} == {torch.float32}


def test_a_gradient_that_nobody_has_stays_none() -> None:
    (part,) = parts_of(kept_by_all(parameters(2, 3, 1)), 1 << 20)
    bucket = Bucket.of(*part)
    here, there, nowhere = bucket.parameters
    here.grad = torch.ones(2)
    for place in range(3):
        bucket.complete(place)
    assert bucket.missing == {1, 2} and not bucket.waiting_for
    bucket.write_flags()
    assert bucket.flat[-3:].tolist() == [1, 0, 0]
    bucket.views[1].fill_(7.0)  # another replica's
    bucket.flat[-2] = 1
    bucket.hand_out(uneven=True)
    assert here.grad.tolist() == [1, 1] and there.grad is not None and there.grad.tolist() == [7, 7, 7]
    assert nowhere.grad is None


def test_a_bucket_is_cut_by_owners_and_not_by_the_order_of_release() -> None:
    found = parts_of(list(zip(parameters(1, 2, 3, 4), [5, 7, 5, None], strict=True)), 1 << 20)
    assert [(owner, [p.numel() for p in inside]) for inside, owner in found] == [
        (5, [1, 3]), (7, [2]), (None, [4]),
    ]  # fmt: skip


def test_products_round_alike_whatever_lies_before_in_the_bucket() -> None:
    left, right = torch.randn(8, 9), torch.randn(9, 8)
    sums = []
    for before in range(20):
        (part,) = parts_of(kept_by_all(parameters(before, 64)), 1 << 20)
        place = Bucket.of(*part).views[1].view(8, 8).fill_(1 / 3)
        assert place.data_ptr() % ALIGNED_BYTES == 0
        sums.append(place.addmm_(left, right))
    assert all(torch.equal(each, sums[0]) for each in sums)


def test_pieces_and_whole_parameters_are_summed_as_the_backward_releases_them() -> None:
    names = [f"{kind}{layer}" for layer in (2, 1, 0) for kind in ("weight", "norm")]
    held = dict(zip(names, parameters(*[8] * 6), strict=True))
    alike, of_all = object(), object()
    kept = Replicated(tuple(names), bucket_bytes=32, parted=frozenset(names[::2]))
    given: Any = None, 0, of_all, kept, alike
    launched: list[tuple[nn.Parameter, Any]] = []
    sums = ReplicaSums(*given)
    sums._launch = lambda bucket, group: launched.append((bucket.parameters[0], group))  # type: ignore[method-assign]
    sums.begin(held)
    sums._armed = True
    for number, name in enumerate(names[:-1]):  # the last bucket follows when the backward ends
        held[name].grad = torch.ones(8)
        for hook in (held[name]._post_accumulate_grad_hooks or {}).values():
            hook(held[name])
        last, group = launched[number]
        assert last is held[name] and group is (alike if name in kept.parted else of_all)
    sums.release()

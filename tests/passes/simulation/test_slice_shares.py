"""What slices take of a stage: attention by what stands before, weights and launches with each, the rest by length."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.graph import Cost
from autopart.passes.simulation.slices import PREFIX, READ, WRITTEN, SliceShares, contexts_of

TOKENS = 100
COSTS = {"attention": Cost(10_000, 20_000), "linear": Cost(40_000, 80_000), "mask": Cost(300, 0)}


def shares(launch_ns: int = 0, weight_ns: float = 0.0, trained_ns: float = 0.0) -> SliceShares:
    passes = {"linear": weight_ns}, {"linear": trained_ns}
    return SliceShares(TOKENS, COSTS, {"attention"}, {"mask"}, launch_ns, *passes, added_ns={"linear": 3 * trained_ns})


def stage_ns(
    own: SliceShares, lengths: list[int], ops: tuple[str, ...] = tuple(COSTS), back: bool = False
) -> list[float]:
    total = sum(COSTS[op].bwd_ns if back else COSTS[op].fwd_ns for op in ops)
    return list(own.stage_ns(ops, total, lengths, contexts_of(lengths), backward=back))


def test_each_slice_takes_the_share_of_its_tokens_and_of_the_keys_before_them() -> None:
    assert stage_ns(shares(), [50, 50], ("linear",)) == [20_000, 20_000]
    assert stage_ns(shares(), [50, 50], ("attention",)) == [2_500, 5_000]
    assert stage_ns(shares(), [50, 50], ("mask",)) == [300, 0]


def test_short_slices_pay_launches_weights_and_sums_of_gradients_as_often_as_there_are_slices() -> None:
    own = shares(launch_ns=100, weight_ns=1_000, trained_ns=500)
    forward, fixed = stage_ns(own, [25] * 4, ("linear",)), 100 + READ * 1_000
    np.testing.assert_allclose(forward, [fixed + (40_000 - fixed) / 4] * 4)
    backward, fixed = stage_ns(own, [25] * 4, ("linear",), back=True), 100 + READ * 1_000 + (WRITTEN + 3) * 500
    np.testing.assert_allclose(backward, [fixed + (80_000 - fixed) / 4] * 4)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.booleans())
def test_a_cut_more_never_makes_what_does_not_look_back_cheaper(lengths: list[int], back: bool) -> None:
    lengths = [*lengths, TOKENS - sum(lengths)] if sum(lengths) < TOKENS else [TOKENS]
    own = shares(launch_ns=50, weight_ns=700, trained_ns=700)
    assert sum(stage_ns(own, lengths, ("linear",), back)) >= sum(stage_ns(own, [TOKENS], ("linear",), back)) - 1e-6


def test_a_gpu_reads_weights_while_it_computes():
    costs = {"product": Cost(800, 1600), "narrow": Cost(100, 200)}
    known = SliceShares(TOKENS, costs, (), (), 0, {"product": 100.0, "narrow": 90.0}, {"product": 100.0}, hides=True)
    both = known.stage_ns(costs, 900, [100, 10], [0, 90], backward=False)
    np.testing.assert_allclose(both, [900, 100 + 90])  # at a tenth both wait for their weights
    # The product reads its weights, and reads and writes the sum of gradients: 300, where its share is 160.
    np.testing.assert_allclose(known.stage_ns(["product"], 1600, [10], [0], backward=True), [300])


def test_slices_of_a_kernel_that_skips_what_causality_hides_gain_nothing():
    own = SliceShares(TOKENS, COSTS, {"attention"}, (), 0, causal={"attention"})
    whole, first, later = 10_000, 2_500, 2 * 5_000  # the first slice skips as well; the later one reads a mask
    assert stage_ns(own, [TOKENS], ("attention",)) == [whole]
    assert stage_ns(own, [50, 50], ("attention",)) == [first, later]


def test_a_gpu_adds_half_precision_gradients_with_every_slice():
    """With a kernel of its own, which no computing hides."""
    known = SliceShares(TOKENS, {"product": Cost(800, 1900)}, (), (), 0, hides=True, added_ns={"product": 300})
    np.testing.assert_allclose(known.stage_ns(["product"], 1900, [50], [0], backward=True), [300 + 800])


def test_gradients_of_keys_and_values_are_added_to_those_of_the_slices_before():
    own = SliceShares(TOKENS, COSTS, {"attention"}, (), 0, prefix_ns={"attention": 10.0})
    assert stage_ns(own, [50, 50], ("attention",)) == [2_500, 5_000]
    assert stage_ns(own, [50, 50], ("attention",), back=True) == [5_000, 10_000 + PREFIX * 10.0 / 2]

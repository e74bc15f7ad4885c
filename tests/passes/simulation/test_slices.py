"""Sliced sequences in the simulator: the dynamic program's objective is its step, and what it holds is bounded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.languages.graphs import cluster
from support.languages.programs import program
from support.oracles.simulated import chain, work_of

from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, pattern
from autopart.passes.simulation.simulate import SliceWork, ordered_ns, simulate, step_ns
from autopart.passes.tokens.lengths import cut_tokens


def sliced(stages: int, micros: int, schedule: str, fwd_ns: list[int], bwd_ns: list[int]) -> int:
    """The step of equal stages, with slices that take these times, and messages that take none."""
    p = chain(stages, micros, schedule, slices=len(fwd_ns))
    work = work_of(p, (fwd_ns[0],) * stages, (bwd_ns[0],) * stages, cluster(stages))
    parts = [SliceWork((f,) * stages, (b,) * stages, (1,) * stages, {}) for f, b in zip(fwd_ns, bwd_ns, strict=True)]
    return step_ns(p, replace(work, slices=tuple(parts) if len(parts) > 1 else ()))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))
def test_the_objective_of_the_cut_is_the_simulated_step(seed: int, cells: int, micros: int, stages: int) -> None:
    """Fill-drain, equal stages, backwards twice as long as forwards: exactly, not about."""
    draw = np.random.default_rng(seed)
    ns = np.full((cells, cells + 1), 1 << 58, dtype=np.int64)
    for c in range(cells):
        ns[c, c + 1 :] = 3 * draw.integers(1, 100, cells - c)
    ends = cut_tokens(ns, micros, stages - 1)
    times = [int(ns[a, b]) for a, b in pairwise((0, *ends))]
    step = sliced(stages, micros, "gpipe", [t // 3 for t in times], [2 * t // 3 for t in times])
    assert step == micros * sum(times) + (stages - 1) * max(times)


@settings(max_examples=40)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(["a | b c d", "a b | c d", "a | b | c | d"]),
    st.integers(1, 4),
    st.integers(2, 4),
    st.data(),
)
def test_an_order_over_slices_takes_as_long_made_into_a_program_as_not(
    schedule: str, stages: str, micros: int, slices: int, data: st.DataObject
) -> None:
    p, c = program(schedule, micros, stages, slices=slices), cluster(4, latency_ns=2)
    count = len(p.stage_ranks)
    numbers = st.lists(st.integers(0, 9), min_size=count, max_size=count).map(tuple)
    work = work_of(p, (0,) * count, (0,) * count, c)
    parts = [
        SliceWork(
            data.draw(numbers),
            data.draw(numbers),
            data.draw(numbers),
            {key: data.draw(st.integers(0, 9)) for key in work.messages},
        )
        for _ in range(slices)
    ]
    work = replace(work, slices=tuple(parts))
    timeline = simulate(p, work)
    order = pattern(find(schedule), Shape(count, micros, slices))
    assert timeline.step_ns == step_ns(p, work) == ordered_ns(order, p.edges, p.tied, p.stage_ranks, work)


@pytest.mark.parametrize("micros", [1, 2, 4])
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_shorten_the_step_and_1f1b_holds_less(slices: int, micros: int) -> None:
    """(m s + p - 1) / s of the time of a micro-batch, and at most (s + p - 1) / s sequences, as Seq1F1B says."""
    stages, unit = 4, 12
    for schedule in SCHEDULES:
        step = sliced(stages, micros, schedule, [unit // slices] * slices, [2 * unit // slices] * slices)
        assert step == 3 * unit * (micros * slices + stages - 1) // slices
    p = chain(stages, micros, "1f1b", slices=slices)
    work = work_of(p, (1,) * stages, (1,) * stages, cluster(stages))
    part = SliceWork((1,) * stages, (2,) * stages, (unit // slices,) * stages, {})
    peaks = simulate(p, replace(work, slices=(part,) * slices)).peak_bytes
    assert all(peak <= unit * (slices + stages - s - 1) / slices for s, peak in enumerate(peaks))
    assert peaks[0] == unit * min(micros * slices, slices + stages - 1) // slices


def test_a_slice_has_its_own_message_and_what_passes_once_is_sent_with_the_first() -> None:
    """Two stages, 2 and 1 bytes a slice at 1 ns each; labels of 5 more go with the first slice."""
    p = chain(2, 1, "gpipe", slices=2)
    work = work_of(p, (0, 0), (0, 0), cluster(2))
    forward, backward = (0, 1, "forward"), (1, 0, "backward")
    parts = (
        SliceWork((1, 1), (0, 0), (1, 1), {forward: 7, backward: 2}),
        SliceWork((1, 1), (0, 0), (1, 1), {forward: 1, backward: 1}),
    )
    timeline = simulate(p, replace(work, slices=parts))
    sends = [(str(s.action), s.start_ns, s.end_ns) for s in timeline.spans if str(s.action)[1:3] in ("SF", "SB")]
    assert sends == [("0SF0>1", 1, 8), ("0SF0.1>1", 8, 9), ("1SB0.1>0", 10, 11), ("1SB0>0", 11, 13)]

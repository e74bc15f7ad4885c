"""What hosts spend besides ops, charged to each compute, each end of a message, each bucket and each step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import cluster
from support.languages.parts import parse_actions
from support.oracles.simulated import chain

from autopart.ir.cluster import HostCosts
from autopart.ir.program import Program
from autopart.passes.program.named import FAMILY as SCHEDULES
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, pattern
from autopart.passes.simulation.simulate import Work, ordered_ns, simulate, step_ns
from autopart.passes.simulation.traffic import ring_load

HOST = HostCosts(compute_ns=10, message_ns=3, sum_ns=50, step_ns=1000)


def work(stages: int, host: HostCosts = HOST) -> Work:
    return Work((2,) * stages, (4,) * stages, (0,) * stages, {}, host=host)


@given(st.integers(1, 8))
def test_one_stage_takes_the_step_and_each_compute(micros: int) -> None:
    assert step_ns(chain(1, micros, "1f1b"), work(1)) == 1000 + micros * (2 + 10 + 4 + 10)


def test_a_message_costs_both_of_its_ends() -> None:
    expected = 1000 + 2 * (2 + 10) + 2 * (4 + 10) + 2 * (3 + 3)
    assert step_ns(chain(2, 1, "1f1b"), work(2)) == expected
    timeline = simulate(chain(2, 1, "1f1b"), work(2))
    assert timeline.step_ns == expected
    assert min(span.start_ns for span in timeline.spans) == 1000


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.integers(1, 4), st.integers(1, 6))
def test_an_order_and_its_program_take_as_long(schedule: str, stages: int, micros: int) -> None:
    program = chain(stages, micros, schedule)
    order = pattern(find(schedule), Shape(stages, micros))
    assert ordered_ns(order, program.edges, (), program.stage_ranks, work(stages)) == step_ns(program, work(stages))


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(["compute_ns", "message_ns", "step_ns"]),
    st.integers(0, 100),
)
def test_no_cost_makes_a_step_shorter(stages: int, micros: int, which: str, more: int) -> None:
    program = chain(stages, micros, "1f1b")
    dearer = replace(HOST, **{which: getattr(HOST, which) + more})
    assert step_ns(program, work(stages, dearer)) >= step_ns(program, work(stages))


@pytest.mark.parametrize(("size", "buckets"), [(1, 1), (100, 1), (101, 2), (1000, 10)])
def test_replicas_pay_for_each_bucket(size: int, buckets: int) -> None:
    program = Program(1, 2, ((0, 1),), parse_actions("0F0 0B0 0R"))
    reduce = ((size, ring_load(cluster(2), (0, 1), 2)),)
    own = replace(work(1, HostCosts(sum_ns=50)), reduce=reduce, bucket_bytes=100)
    assert step_ns(program, own) - step_ns(program, replace(own, host=HostCosts())) == 50 * buckets

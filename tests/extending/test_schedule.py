"""A schedule from outside, in a few lines: planned, verified, simulated, run and refused like ours."""

from __future__ import annotations

import pytest
from support.extending import own_schedule
from support.extending.own_schedule import eager_first_stage
from support.languages.graphs import cluster, graph, plan_of
from support.oracles.strict import hangs, issued
from support.workers import Workers

from autopart.ir.errors import ProgramError, UsageError
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import register
from autopart.passes.program.verify import check_program

MODEL = graph("a:3 +w #4 <- x; b:3 +v #4 <- a; c:3 +u #4 <- b; d:3 +t #4 <- c")


def test_a_schedule_of_a_user_is_planned_verified_and_simulated_like_ours() -> None:
    schedule = register(eager_first_stage)
    plan = plan_of(MODEL, cluster(2), stages=2, micros=4, schedule=schedule.name)
    assert plan.schedule == "eager_first_stage" and plan.step_ns > 0
    assert [estimate.live for estimate in plan.estimates] == [4, 1]  # counted from the order
    program = check_program(route(plan.decision, MODEL), plan.schedule)
    assert [str(a) for a in program.part(0) if a.kind in ("F", "B")] == eager_first_stage(2, 4)[0]
    assert hangs(issued(program)) == []


def test_a_schedule_of_a_user_is_run_and_gives_the_gradients_of_one_process(pair: Workers) -> None:
    assert pair.run(own_schedule.verified) == [(True, eager_first_stage(2, 4)[0])] * 2


def test_a_wrong_schedule_is_refused_with_what_waits_for_ever() -> None:
    def backwards_first(stages: int, micro_batches: int) -> list[list[str]]:
        return [
            [f"{stage}{kind}{i}" for kind in ("BF" if stage == 1 else "FB") for i in range(micro_batches)]
            for stage in range(stages)
        ]

    schedule = register(backwards_first)
    with pytest.raises(
        ProgramError, match=r"schedule backwards_first can never end: 0B0 waits for ever for 1B0"
    ) as caught:
        check_program(route(plan_of(MODEL, cluster(2), stages=2, schedule=schedule.name).decision, MODEL))
    assert "worker 1 waits at 1B0 for 1F0" in (caught.value.why or "")


def test_a_schedule_that_nobody_registered_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="unknown schedule 'mine'") as caught:
        plan_of(MODEL, cluster(2), stages=2, schedule="mine")
    assert "autopart.register_schedule(my_order)" in (caught.value.fix or "")

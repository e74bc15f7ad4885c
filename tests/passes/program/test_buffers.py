"""A buffer that changes in the step stays on one stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.languages.graphs import cluster, graph, plan_of

from autopart.ir.errors import UsageError
from autopart.ir.graph import Param


def _counter(first: int, last: int, ops: int = 6):
    """A chain of ops of equal cost, of which `first` reads and `last` updates a buffer."""
    names = "abcdef"[:ops]
    chain = graph("; ".join(f"{n}:3" if i == 0 else f"{n}:3 <- {names[i - 1]}" for i, n in enumerate(names)))
    changed = tuple(
        replace(op, params=(*op.params, "counter")) if i in (first, last) else op for i, op in enumerate(chain.ops)
    )
    params = (*chain.params, Param("counter", (), "int64", 8, kind="buffer"))
    return replace(chain, ops=changed, params=params, updates=(("counter", chain.ops[last].writes[0]),))


@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 3), (2, 5), (4, 4)])
def test_the_plan_keeps_all_users_of_such_a_buffer_on_one_stage(first, last):
    made = _counter(first, last)
    plan = plan_of(made, cluster(2), stages=2, micros=2)
    users = {made.ops[first].name, made.ops[last].name}
    assert sum(bool(users & set(stage.ops)) for stage in plan.stages) == 1


def test_more_stages_than_such_buffers_allow_are_refused_with_the_number():
    with pytest.raises(UsageError, match="blocks"):
        plan_of(_counter(0, 5), cluster(2), stages=2, micros=1)

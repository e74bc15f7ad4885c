"""A plan from before is taken for the question that it answers, and for no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.graphs import cluster, layers, source

from autopart.ir.errors import PlanError
from autopart.passes.pipeline import build, recheck
from autopart.passes.search.space import PlanRequest

REQUEST = PlanRequest(((1,) * 4,))


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"stages": 3}, "it has 2 stages, not 3"),
        ({"cuts": ("layers.1",)}, "spans a cut"),
        ({"together": (("layers.0", "layers.2"),)}, "stand in several stages"),
        ({"pins": {"layers.2": 0}}, "is not in stage 0"),
        ({"replicas": 2}, "other replicas"),
        ({"recompute": "all"}, "does not recompute everything"),
        ({"recompute": "off", "recomputed": (("u0", "d0"),)}, "does not recompute what was asked for"),
        ({"schedule": "gpipe"}, "another schedule"),
        ({"state_factor": 7.0}, "does not take what it says"),
    ],
)  # fmt: skip
def test_a_plan_of_another_request_is_ignored(asked: dict[str, Any], why: str) -> None:
    graph, machines = layers(3), cluster(2)
    known = source(graph, machines)
    wide = replace(REQUEST, stages=2, schedule="1f1b")
    made = build(known, machines, replace(wide, cuts=("layers.2",), replicas=1, recompute="off"))
    recheck(made, known, machines, wide)
    with pytest.raises(PlanError) as caught:
        recheck(made, known, machines, replace(wide, **asked))
    assert why in caught.value.why


def test_every_plan_that_is_built_answers_its_own_request() -> None:
    graph = layers(4)
    for devices, change in (
        (1, {}), (2, {"schedule": "pipedream"}), (4, {}), (4, {"stages": 2}), (4, {"replicas": 2}),
        (3, {"cuts": ("layers.1",)}), (3, {"cuts": ("layers.1", "layers.3")}), (2, {"pins": {"layers.3": 1}}),
        (2, {"together": (("layers.1", "layers.2"),)}), (2, {"recompute": "all"}), (2, {"prove_seconds": 1.0}),
        (2, {"recompute": "off", "recomputed": (("u0", "d0"), ("u3",))}), (2, {"recomputed": (("n1", "u1", "d1"),)}),
    ):  # fmt: skip
        machines = cluster(devices)
        request = replace(PlanRequest(((2,) * 4, (4, 4))), **change)
        made = build(source(graph, machines), machines, request)
        assert recheck(made, source(graph, machines), machines, request) == made, change

"""Tests of the commands that plan published configurations, at a size that takes seconds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.papers import published
from benchmarks.planning import plan_speed
from benchmarks.shared import shapes


def test_every_published_configuration_has_the_published_number_of_parameters() -> None:
    known = published.cases()
    assert len({case.name for case in known}) == len(known) == 18 + 12 + 4
    for case in known:
        if "152" in case.name or case.name.endswith("x24"):
            with torch.device("meta"):
                model, _ = case.make()
            digits = len(str(case.published_b).split(".")[1])
            assert round(shapes.parameters(model) / 1e9, digits) == case.published_b, case.name


def test_a_case_is_planned_alone_and_its_failure_is_a_result() -> None:
    case = published.Case(
        "tiny",
        lambda: (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.empty(64, 8), torch.empty(64, 8))),
        144e-9,
        {"optimizer": "momentum", "loss_fn": nn.functional.mse_loss},
    )
    found = shapes.alone(lambda: published.result(case))
    assert found["fits"]
    assert found["parameters_b"] == case.published_b
    assert found["rss_gb"] > 0.1
    assert sum(found["replicas"]) <= 32
    assert "tiny" in published.row(case, found)

    broken = published.Case("broken", lambda: 1 // 0, 1.0, {})  # type: ignore[arg-type, return-value]
    assert shapes.alone(lambda: published.result(broken))["failed"].startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("ours", "rannc", "holds"),
    [((1.02, 10), (1.1, 9), True), ((1.2, 10), (1.1, 11), True), ((1.2, 10), (1.1, 9), False)],
)
def test_a_plan_is_as_good_when_it_is_as_even_or_faster(
    ours: tuple[float, int], rannc: tuple[float, int], holds: bool
) -> None:
    known = [c for c in published.cases() if "resnet152x8" in c.name]
    done = {
        case.name: {"fits": True, "parameters_b": 3.7286, "imbalance": imbalance, "step_ms": step}
        for case, (imbalance, step) in zip(known, (ours, rannc), strict=True)
    }
    claims = published.judged(done, known)
    assert claims.pop("all 2 plan and fit")
    assert claims.pop("parameters as published")
    assert list(claims.values()) == [holds]


def test_the_times_of_the_passes_add_up() -> None:
    case = plan_speed.Case("tiny", lambda: shapes.gpt2(1, 32, 2, 64), 16, 64, "cpu:2", seconds=60)
    found = shapes.alone(lambda: plan_speed.result(case))
    assert {"capture", "costs", "atoms", "coarsen", "partition", "evaluate", "bound", "finalize"} <= set(
        found["passes_s"]
    )
    assert sum(found["passes_s"].values()) == pytest.approx(found["seconds"])
    assert found["passes_s"]["capture"] > 0
    assert all(plan_speed.judged(case, found).values())


def test_the_plot_is_an_svg_with_a_circle_for_each_number() -> None:
    rows = [{"layers": n, "devices": n, "captured_s": 2.0 * n, "solving_s": 1.0} for n in (1, 2, 4)]
    drawn = plan_speed.plot({"layers": rows, "devices": rows})
    assert drawn.startswith("<svg")
    assert drawn.count("<circle") == 12

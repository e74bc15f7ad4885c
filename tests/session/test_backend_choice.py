"""backend="auto": compiled where the steps to come pay for compiling, as rank 0 finds out once for all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.files.caches.compiled_cache import CompiledProgram
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.options import Options
from autopart.planning.backend import LEAST_COMPILE_NS, cannot_pay, pays, runs_compiled
from autopart.session.code import compiled_costs as costs_module
from autopart.session.code.inductor import Inductor
from autopart.session.session import Session


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPART_CACHE", str(tmp_path))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 2 + 1
        return x.square().mean()


BATCH = torch.ones(64, 64)


def planned(**options: Any) -> Plan:
    return autopart.plan(Net(), "cpu:1", sample=BATCH, micro_batches=2, optimizer="sgd", **options)


def plan_of(step_ns: int, costs: str) -> Plan:
    plan = planned(costs="analytic")
    made = replace(plan.provenance, costs=costs)
    return replace(plan, provenance=made, outlook=replace(plan.outlook, step_ns=step_ns))


def compiles_in(monkeypatch: pytest.MonkeyPatch, compile_ns: int, faster: int = 2) -> list[str]:
    """Let compiled code be `faster` times as fast without making any, and return what is compiled."""
    seen: list[str] = []

    def measured(_: object, graph: Graph, where: object) -> CompiledProgram:
        seen.append("compiled")
        times = ((max(1, op.cost.fwd_ns // faster), op.cost.bwd_ns // faster, op.cost.saved_bytes) for op in graph.ops)
        return CompiledProgram(compile_ns, tuple(times))

    monkeypatch.setattr(costs_module, "_measured", measured)
    return seen


def test_steps_pay_for_compiling_from_a_number_on() -> None:
    eager, compiled = plan_of(10_000_000, "measured"), plan_of(8_000_000, "compiled")
    assert not pays(9_999, eager, compiled, 20 * 10**9)[0]
    chosen, note = pays(10_000, eager, compiled, 20 * 10**9)
    assert chosen
    assert note == "backend: inductor; compiled code saves 2 ms a step and takes 20 s to make, which 10,000 steps pay"


def test_code_that_is_not_faster_never_pays() -> None:
    eager, compiled = plan_of(10_000_000, "measured"), plan_of(10_000_000, "compiled")
    assert not pays(10**9, eager, compiled, 1)[0]


def test_code_that_cannot_be_measured_is_not_chosen() -> None:
    eager, other = plan_of(10_000_000, "measured"), plan_of(1, "measured")
    assert pays(10**9, eager, other, 1) == (False, "backend: eager, since compiled code cannot be measured here")


@pytest.mark.parametrize(
    ("options", "costs", "why"),
    [
        ({"steps": None}, "measured", "steps="),
        ({"steps": 10**9, "costs": "analytic"}, "analytic", "costs="),
        ({"steps": 10**9}, "analytic", "nothing can be measured"),
        ({"steps": LEAST_COMPILE_NS // 10_000_000 - 1}, "measured", "compiling at least 5 s"),
        ({"steps": LEAST_COMPILE_NS // 10_000_000}, "measured", ""),
    ],
)
def test_nothing_is_compiled_where_it_cannot_pay(options: dict[str, Any], costs: str, why: str) -> None:
    note = cannot_pay(Options(backend="auto", **options), plan_of(10_000_000, costs))
    assert why in note if why else not note


@pytest.mark.parametrize(
    ("backend", "costs", "compiled"),
    [
        ("eager", "compiled", False),
        ("inductor", "analytic", True),
        ("auto", "compiled", True),
        ("auto", "measured", False),
    ],
)
def test_a_plan_says_whether_its_stages_are_compiled(backend: str, costs: str, compiled: bool) -> None:
    assert runs_compiled(Options(backend=backend), plan_of(1, costs)) is compiled


def test_few_steps_are_run_eagerly_without_compiling_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compiles_in(monkeypatch, 10**9)
    plan = planned(backend="auto", steps=1)
    assert plan.provenance.costs == "measured"
    assert not seen
    assert "backend: eager, since 1 steps take" in plan.explain()


def test_many_steps_pay_for_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = compiles_in(monkeypatch, 10**9)
    plan = planned(backend="auto", steps=10**9)
    assert plan.provenance.costs == "compiled"
    assert seen
    assert "backend: inductor; compiled code saves" in plan.explain()
    assert planned(backend="auto", steps=10**9) == plan


def test_a_long_compilation_is_not_paid_by_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_in(monkeypatch, 10**18)
    plan = planned(backend="auto", steps=10**6)
    assert plan.provenance.costs == "measured"
    assert "backend: eager; compiled code saves" in plan.explain()


def test_the_plan_decides_what_a_running_pipe_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_in(monkeypatch, 10**9)
    made: list[str] = []
    monkeypatch.setattr(Inductor, "compile", lambda _, code, *rest: made.append("stage") or code)
    with autopart.compile(Net(), "cpu:1", sample=BATCH, micro_batches=2, backend="auto", steps=10**9) as pipe:
        assert pipe.session.context.options.backend == "inductor"
        assert made == ["stage"]
        assert torch.isfinite(pipe.step(BATCH))
        assert isinstance(pipe.session, Session)
        pipe.adopt(plan_like(pipe.plan, "measured"))
        assert pipe.session.context.options.backend == "eager"
        assert made == ["stage"]


def plan_like(plan: Plan, costs: str) -> Plan:
    return replace(plan, provenance=replace(plan.provenance, costs=costs))


def test_steps_without_auto_change_nothing() -> None:
    assert 'steps= has no effect: it decides about compiling with backend="auto"' in planned(steps=10).explain()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_a_number_of_steps_is_a_whole_number(steps: object) -> None:
    with pytest.raises(UsageError, match="steps"):
        planned(backend="auto", steps=steps)

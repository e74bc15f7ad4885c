"""Which numbers of rows are captured for a plan, how a single row may differ, and the notes of the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.grids import sampled
from support.languages.refusals import batch, net
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, Captured
from autopart.costs.sources import CostedGraph
from autopart.files.plans import match_plan
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.errors import RefusedError, UsageError
from autopart.ir.graph import Size
from autopart.ir.shares import parts
from autopart.options import read_options
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.program.orders import Schedule
from autopart.passes.program.schedules import find, register
from autopart.planning.make import Planned, make_plan
from autopart.planning.restrictions import at_one_size

SLOW = Cluster((Device("cpu", 1 << 40, 10**7, 10**12),) * 4, (Level(4, Link(0, 10**12)),))
"""Four devices on which only FLOPs take time, so that the smallest micro-batches have the shortest step."""
LEFT_OUT = "micro-batches of one row were left out"


class Layers(nn.Module):
    """Four layers; `extra` changes the rows before them."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.shift = nn.Parameter(torch.zeros(1, 16))
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.extra(self, x) if self.extra else x + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def expanding(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Skip `expand` for a single row, which changes the program."""
    return x + (m.shift.expand(x.shape[0], -1) if x.shape[0] > 1 else m.shift)


def refusing(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Refuse a single row, as BatchNorm does with one value per channel."""
    if x.shape[0] == 1:
        raise ValueError("more than one row, please")
    return x + m.shift


def bent(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Create a tensor whose size is not linear in the rows."""
    return x + torch.ones(x.shape[0] ** 2).sum() * m.shift


class Counted(CaptureCache):
    """A capture cache that records the numbers of rows that it is asked for in order."""

    rows: tuple[int, ...] = ()

    def __call__(self, batch: Any, size: Size, mode: str = "step") -> Any:
        self.rows = (*self.rows, size.rows)
        return super().__call__(batch, size, mode)


@cache
def captures(extra: Any, meta: bool) -> tuple[Counted, CaptureCache]:
    """Return captures for planning, and others to match plans with, which all tests of a model have together."""
    model = Layers(extra).to("meta") if meta else Layers(extra)
    return Counted(model, F.mse_loss), CaptureCache(model, F.mse_loss)


def planned(
    extra: Any = None, rows: int = 8, *, meta: bool = False, runtime: bool = True, **options: Any
) -> tuple[Planned, tuple[int, ...]]:
    device = "meta" if meta else "cpu"
    data = (torch.ones(rows, 16, device=device), torch.ones(rows, 16, device=device))
    capturer, fresh = captures(extra, meta)
    capturer.rows = ()
    options = {"replicas": 1, **options} if runtime else options
    read = read_options(costs="analytic", loss_fn=F.mse_loss, optimizer="sgd", **options)
    made = make_plan(capturer, flatten(data, with_target=True), SLOW, read, to_run=runtime)
    found = fresh(flatten(data, with_target=True), Size(max(made.plan.micro_rows)))
    match_plan(made.plan, found.graph, torch_version=torch.__version__, world=4)
    return made, capturer.rows


@pytest.mark.parametrize("meta", [False, True])
def test_one_row_is_captured_last(meta: bool) -> None:
    made, rows = planned(meta=meta)
    assert made.plan.micro_rows == (1,) * 8 and made.plan.notes == ()
    assert 1 not in rows[: 1 if meta else 2] and 1 in rows  # without weights one other capture suffices


@pytest.mark.parametrize("meta", sampled([False, True]))
@pytest.mark.parametrize("extra", [expanding, refusing])
def test_one_row_with_another_program_is_left_out_with_a_note(extra: Any, meta: bool) -> None:
    made, rows = planned(extra, meta=meta)
    assert made.plan.micro_rows == (2,) * 4 and 1 in rows
    assert [note for note in made.plan.notes if LEFT_OUT in note]


def test_uneven_micro_batches_with_one_row_are_left_out() -> None:
    made, _ = planned(expanding, rows=3)
    assert made.plan.micro_rows == (3,) and LEFT_OUT in " ".join(made.plan.notes)


@pytest.mark.parametrize("extra", sampled([expanding, refusing]))
def test_requested_micro_batches_of_one_row_with_another_program_are_refused(extra: Any) -> None:
    with pytest.raises((RefusedError, autopart.CaptureError)):
        planned(extra, micro_batches=8)


def test_requested_micro_batches_of_one_row_are_planned() -> None:
    made, rows = planned(micro_batches=8)
    assert made.plan.micro_rows == (1,) * 8 and made.captured.graph.rows == 1 and rows[0] == 2


def test_micro_batches_of_one_row_are_planned_where_torch_copies_only_the_rows_of_larger_ones() -> None:
    def shifted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[:, :-1].reshape(-1, 16), target[:, 1:].reshape(-1))

    data = torch.ones(8, 4, 16), torch.ones(8, 4, dtype=torch.long)
    plan = autopart.plan(
        nn.Linear(16, 16), "cpu:1", sample=data, loss_fn=shifted, micro_batches=8, costs="analytic", cache=False
    )
    assert plan.micro_rows == (1,) * 8


def test_a_batch_of_one_row_is_captured_at_one_row_only() -> None:
    made, rows = planned(expanding, rows=1)
    assert made.plan.micro_rows == (1,) and set(rows) == {1}


def test_a_program_that_is_not_linear_in_the_rows_is_planned_at_one_size_without_replicas() -> None:
    made, _ = planned(bent, runtime=False, micro_batches=1)
    assert made.plan.notes[-1].startswith("only micro-batches of 8 rows and no replicas were tried")
    assert all(len(stage.ranks) == 1 for stage in made.plan.stages)
    assert "were tried" not in " ".join(planned(bent, micro_batches=1)[0].plan.notes)


def test_replicas_of_a_program_that_is_not_linear_in_the_rows_are_refused() -> None:
    with pytest.raises(UsageError, match=r"(?s)replicas cannot be planned.*replicas=1"):
        planned(bent, runtime=False, replicas=2, micro_batches=1)


def test_at_one_size_keeps_the_captured_size_or_the_only_one() -> None:
    assert at_one_size(((8,), (2,) * 4, (1,) * 8), Size(2)) == ((2,) * 4,)
    assert at_one_size(((1,) * 8,), Size(2)) == ((1,) * 8,)


@pytest.mark.parametrize("extra", sampled([expanding, refusing]))
def test_replicas_get_two_rows_each_if_one_row_has_another_program(extra: Any) -> None:
    plan = planned(extra, rows=4, runtime=False, micro_batches=1)[0].plan
    assert max(len(stage.ranks) for stage in plan.stages) == 2
    assert {own for stage in plan.stages for own in parts(stage.division, 0, 4)} <= {2, 4}
    assert "replicas with one row of a micro-batch were left out: on a single row" in " ".join(plan.notes)
    assert max(len(stage.ranks) for stage in planned(rows=4, runtime=False, micro_batches=1)[0].plan.stages) == 4


def test_requested_replicas_with_a_single_row_are_refused_with_a_fix() -> None:
    with pytest.raises(UsageError, match=r"(?s)4 replicas cannot be planned.*single row.*at least 8 rows"):
        planned(expanding, rows=4, runtime=False, replicas=4, micro_batches=1)
    plan = planned(expanding, runtime=False, replicas=4, micro_batches=1)[0].plan
    assert [len(stage.ranks) for stage in plan.stages] == [4] and plan.notes == ()


def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) * 2


def test_stages_with_different_replicas_are_cut_before_a_sum_over_rows() -> None:
    """A cut after the sum would leave the least work to the stage with one device."""
    data = (torch.ones(8, 16), torch.ones(8, 16))
    for micro_batches in (1, 2):
        plan = autopart.plan(
            Layers(), SLOW, sample=data, loss_fn=scaled, costs="analytic", stages=2, replicas=(3, 1),
            micro_batches=micro_batches,
        )  # fmt: skip
        assert [len(stage.ranks) for stage in plan.stages] == [3, 1]
        assert any("mse_loss" in op for op in plan.stages[1].ops), plan.stages[1].ops


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output @ target.T, torch.arange(output.shape[0]))


def test_a_loss_that_couples_the_rows_has_one_micro_batch_or_is_refused_with_a_fix() -> None:
    options = {"sample": (torch.ones(8, 16), torch.ones(8, 16)), "loss_fn": contrastive, "costs": "analytic"}
    with pytest.raises(RefusedError, match="micro_batches=1"):
        autopart.plan(Layers(), SLOW, micro_batches=2, **options)
    plan = autopart.plan(Layers(), SLOW, **options)
    assert plan.micro_rows == (8,) and any("only one micro-batch was tried" in note for note in plan.notes)
    assert autopart.plan(Layers(), SLOW, micro_batches=1, **options).micro_rows == (8,)


def test_separate_batch_statistics_of_replicas_are_noted() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    data = (torch.ones(8, 16), torch.ones(8, 16))
    options = {"sample": data, "loss_fn": F.mse_loss, "costs": "analytic", "micro_batches": 1, "stages": 1}
    notes = {n: " ".join(autopart.plan(model, SLOW, replicas=n, **options).notes) for n in (1, 2)}
    assert "BatchNorm" in notes[2] and "BatchNorm" not in notes[1]


@pytest.mark.parametrize("asked", [None, "auto"])
def test_what_token_slices_would_take_is_told_when_devices_idle(asked: str | None) -> None:
    model = nn.Sequential(nn.Embedding(8, 16), *(nn.Linear(16, 16) for _ in range(4)))
    read = read_options(costs="analytic", loss_fn=lambda y, t: y.mean() * t, stages=4, replicas=1, token_slices=asked)
    batch = flatten((torch.zeros(4, 64, dtype=torch.long), torch.ones(())), with_target=True)
    plan = make_plan(CaptureCache(model, read.loss_fn), batch, SLOW, read, to_run=False).plan
    assert asked or plan.outlook.bubble > 0.15
    assert any("token_slices=" in other.name for other in plan.outlook.alternatives) == (asked is None)


def test_an_asynchronous_schedule_of_a_user_is_planned_and_not_run() -> None:
    name = register(Schedule("without_update", find("1f1b").order, synchronous=False)).name
    with pytest.raises(UsageError, match="schedule 'without_update' cannot be run yet") as caught:
        planned(schedule=name)
    assert "pipe.train" in (caught.value.fix or "")
    assert planned(runtime=False, schedule=name)[0].plan.schedule == name


@pytest.mark.parametrize(("schedule", "versions"), [("pipedream", "3, 2, 1"), ("pipedream-2bw", "2, 2, 2")])
def test_a_plan_says_how_old_weights_are_and_how_many_versions_it_holds(schedule: str, versions: str) -> None:
    micros = {"pipedream": 1, "pipedream-2bw": 2}[schedule]
    plan = planned(schedule=schedule, stages=3, replicas=1, micro_batches=micros)[0].plan
    assert f"note: versions of the weights that the stages hold: {versions};" in plan.explain()
    assert "updates old" in plan.explain()
    sizes, older = [e.param_bytes for e in plan.estimates], [int(number) - 1 for number in versions.split(", ")]
    flushed = planned(schedule="1f1b", stages=3, replicas=1, micro_batches=micros)[0].plan
    assert [e.live for e in plan.estimates] == [3, 2, 1]
    if plan.stages == flushed.stages:
        more = [a.state_bytes - b.state_bytes for a, b in zip(plan.estimates, flushed.estimates, strict=True)]
        assert more == [count * size for count, size in zip(older, sizes, strict=True)]


@pytest.mark.parametrize(
    ("option", "name"),
    sampled(
        [
            ({"zero": 1}, "zero=1"),
            ({"bucket_bytes": 4096}, "bucket_bytes="),
            ({"replica_policy": "split"}, "replica_policy="),
            ({"sync_batchnorm": True}, "sync_batchnorm=True"),
        ]
    ),
)
def test_an_option_for_replicas_has_no_effect_without_them_and_the_plan_says_so(option, name):
    note = f"{name} has no effect: no stage of this plan has replicas"
    assert note in _planned_net(replicas=1, **option).notes
    assert not any("has no effect" in line for line in _planned_net(replicas=1).notes)
    if "sync_batchnorm" not in option:
        assert not any("has no effect" in line for line in _planned_net(replicas=2, **option).notes)


def test_sync_batchnorm_has_no_effect_on_a_model_without_batch_norm_and_the_plan_says_so():
    assert any("takes no batch statistics" in line for line in _planned_net(replicas=2, sync_batchnorm=True).notes)


@pytest.mark.parametrize(
    ("options", "micros", "own"),
    [
        ({"replicas": 1, "micro_batches": 4}, True, ""),
        ({"replicas": 2, "micro_batches": 1}, False, "rows"),
        ({"replicas": 2, "micro_batches": 4, "replica_policy": "turn"}, True, "micro-batches"),
        ({"replicas": 2, "micro_batches": 4, "sync_batchnorm": True}, True, ""),
    ],
)
def test_a_plan_says_over_which_rows_batch_statistics_are_taken(options, micros, own):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    x = torch.randn(16, 4)
    plan = autopart.plan(
        model, "cpu:2", sample=(x, x), loss_fn=torch.nn.functional.mse_loss, costs="analytic", stages=1, **options
    )
    said = "\n".join(plan.notes)
    assert ("of each micro-batch (4 rows)" in said) is micros
    assert (f"per replica, each of its own {own}" in said) is bool(own)


@pytest.mark.parametrize("given", [False, True])
def test_master_weights_have_no_effect_in_fp32_and_the_plan_says_so(given):
    plan = {"plan": _planned_net(replicas=1)} if given else {"replicas": 1}
    note = "master_weights=True has no effect: no trained parameter is in bf16 or fp16"
    assert note in _planned_net(master_weights=True, **plan).notes
    half = _planned_net(torch.bfloat16, replicas=1, master_weights=True)
    assert not any("has no effect" in line for line in half.notes)


@pytest.mark.parametrize("options", [{"master_weights": True}, {"replicas": 2, "zero": 1}, {"stages": 2, "prove": 1}])
def test_a_plan_that_is_planned_again_is_the_same_plan(options):
    plan = _planned_net(**options)
    assert _planned_net(plan=plan) == plan
    assert _planned_net(plan=plan, master_weights="master_weights" in options) == plan


def _planned_net(dtype: torch.dtype = torch.float32, **options: Any) -> autopart.Plan:
    x, y = batch()
    return autopart.plan(
        net().to(dtype), "cpu:2", sample=(x.to(dtype), y), loss_fn=F.cross_entropy, costs="analytic", **options
    )


def test_a_plan_that_its_own_costs_make_slow_gives_way_to_a_settled_alternative() -> None:
    """Costs are taken at two rows, and promise that single rows take half; by their own costs they take five times."""

    def dearer_alone(captured: Captured, device: Device) -> CostedGraph:
        graph = analytic_costs(captured.graph, device)
        if graph.rows != 1:
            return CostedGraph(graph)
        costs = [replace(op.cost, fwd_ns=5 * op.cost.fwd_ns, bwd_ns=5 * op.cost.bwd_ns) for op in graph.ops]
        return CostedGraph(
            replace(graph, ops=tuple(replace(op, cost=cost) for op, cost in zip(graph.ops, costs, strict=True)))
        )

    def plan(**options: Any) -> autopart.Plan:
        model, data = Layers(), (torch.ones(8, 16), torch.ones(8, 16))
        read = read_options(costs=dearer_alone, loss_fn=F.mse_loss, optimizer="sgd", replicas=1, stages=2, **options)
        return make_plan(CaptureCache(model, F.mse_loss), flatten(data, with_target=True), SLOW, read).plan

    promised, alone, found = planned(stages=2)[0].plan, plan(micro_batches=8), plan()
    assert promised.micro_rows == (1,) * 8 and max(found.micro_rows) > 1
    assert found.step_ns < alone.step_ns
    settled = [a for a in found.outlook.alternatives if "by their own costs" in a.name]
    assert [a.step_ns for a in settled] == [alone.step_ns] and "+" in settled[0].why
    assert all(a.step_ns >= found.step_ns for a in settled)

"""Options, plan files, processes and states that cannot work end in one of our errors, before any data is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.languages.plans import changed
from support.languages.refusals import Body, batch, compiled, net, planned, refused
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache
from autopart.files.clusters import parse_cluster
from autopart.ir.errors import (
    BatchError,
    ClusterError,
    PlanError,
    PlanFileError,
    UsageError,
)
from autopart.options import read_options
from autopart.passes.program.orders import Schedule
from autopart.passes.program.schedules import find, register
from autopart.planning.make import make_plan

register(Schedule("no_update", find("1f1b").order, synchronous=False))

# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "zigzag"}, ("schedule 'zigzag'", "1f1b, 1f1b-deep, gpipe")),
        ({"stages": 0}, ("stages is 0",)),
        ({"plan": 3}, ("plan is a int",)),
    ],
)
def test_impossible_options_are_refused_before_any_work(options, words):
    with refused(UsageError, *words):
        compiled(net(), batch(), **options)


def test_a_plan_excludes_what_it_fixes():
    options = {"stages": 2, "micro_batches": 2, "cuts": ["2"], "schedule": "gpipe", "replicas": 1}
    options |= {"recompute": "off", "together": ["0"], "pins": {"0": 0}, "zero": 0, "bucket_bytes": 4096}
    options |= {"replica_policy": "split", "token_slices": 2, "prove": 1.0, "tensor_parallel": 1}
    plan = planned()
    for name, value in options.items():
        with refused(UsageError, f"both plan= and {name}="):
            compiled(net(), batch(), plan=plan, **{name: value})
    with refused(UsageError, "both plan= and zero="):
        autopart.plan(net(), "cpu:1", sample=batch(), plan=plan, zero=1)


@cache
def captures_of_net() -> CaptureCache:
    return CaptureCache(net(), F.cross_entropy)


def for_the_runtime(cluster: str, **options: Any) -> autopart.Plan:
    """The plan that `compile` makes or takes, without the processes to run it."""
    data = flatten(batch(), with_target=True)
    read = read_options(costs="analytic", loss_fn=F.cross_entropy, **options)
    return make_plan(captures_of_net(), data, parse_cluster(cluster), read).plan


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "no_update"}, ("schedule 'no_update' cannot be run yet", "auto, 1f1b, 1f1b-deep, gpipe")),
        ({"pins": {"2": 3}, "stages": 2}, ("2 is pinned to stage 3, which does not exist", "one of 0 to 1")),
        ({"pins": {"nowhere": 0}}, ("'nowhere'",)),
        ({"together": [("0", "nowhere")]}, ("'nowhere'",)),
        ({"optimizer": "adamz"}, ("unknown optimizer 'adamz'",)),
    ],
)
def test_what_the_planner_or_the_runtime_cannot_do_is_refused(options, words):
    with refused(UsageError, *words):
        for_the_runtime("cpu:4", **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: changed(p, schedule="no_update"),
        lambda p: changed(p, schedule="no_update", stages=(replace(p.stages[0], ranks=(1, 0)),)),
    ],
)
def test_a_plan_that_cannot_be_run_yet_is_refused_with_what_it_lacks(tmp_path, change):
    plan = change(changed(planned("cpu:1", stages=1), world=2))
    path = tmp_path / "plan.json"
    autopart.save_plan(plan, path)
    for given in (plan, path):
        with refused(PlanError, "schedule 'no_update' cannot be run yet\n", "compile without plan="):
            for_the_runtime("cpu:2", plan=given)
    if len(plan.stages[0].ranks) == 1:
        with refused(PlanError, "schedule 'no_update' cannot be run yet\n"):
            compiled(net(), batch(), plan=changed(plan, world=1), loss_fn=F.cross_entropy)
    assert autopart.plan(net(), "cpu:2", sample=batch(), loss_fn=F.cross_entropy, plan=path) == plan


def test_more_stages_than_blocks_or_devices_are_refused_with_the_most_that_work():
    with refused(UsageError, "64 stages", "at most stages="):
        planned("cpu:64", stages=64)
    with refused(UsageError, "3 stages need 3 devices"):
        planned("cpu:2", stages=3)


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        (["7"], "'7'"),
        (["1.1", "7"], "'7'"),
        (["0"], "first op"),
        (["1", "1.0"], "same op"),
        (["1.0", "1.1", "1.2"], "4 stages"),
    ],
)
def test_cuts_that_cannot_be_are_refused(cuts, words):
    nested = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)))
    with refused(UsageError, words):
        planned("cpu:3", model=nested, cuts=cuts)


@pytest.mark.parametrize("cluster", ["tpu:2", "cpu:0", "cpu:x", 17, "missing.yaml"])
def test_a_cluster_that_is_none_is_refused(cluster):
    with pytest.raises(ClusterError, match=r"\S"):
        compiled(net(), batch(), cluster=cluster, loss_fn=F.cross_entropy)


def test_using_a_pipe_before_it_is_planned_says_how_to():
    pipe = autopart.compile(Body(), "cpu:1")
    for use in (pipe.explain, pipe.state_dict, lambda: pipe.plan, pipe.gradients):
        with refused(UsageError, "not been planned", "sample=batch"):
            use()
    with refused(BatchError, "without a batch"):
        pipe.step()
    with refused(UsageError, "sample"):
        autopart.plan(Body(), "cpu:1", sample=None)


# -- processes ---------------------------------------------------------------------------------------------------


def test_one_process_alone_cannot_run_a_plan_for_two():
    with refused(ClusterError, "2 processes", "torchrun"):
        compiled(net(), batch(), cluster="cpu:2", loss_fn=F.cross_entropy)


def test_another_world_size_than_the_clusters_is_refused_before_connecting(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with refused(ClusterError, "2 devices", "3 processes", "--nproc-per-node 2"):
        compiled(net(), batch(), cluster="cpu:2", loss_fn=F.cross_entropy)


# -- plan files --------------------------------------------------------------------------------------------------


def edited(tmp_path: Any, edit: Callable[[str], str], plan: autopart.Plan | None = None) -> Any:
    path = tmp_path / "plan.json"
    autopart.save_plan(plan or planned("cpu:1"), path)
    path.write_text(edit(path.read_text()))
    return path


def _changed(section: str = "", **fields: Any) -> Callable[[str], str]:
    """Other values for fields of a section, or of the file itself."""

    def edit(text: str) -> str:
        document = json.loads(text)
        (document[section] if section else document).update(fields)
        return json.dumps(document)

    return edit


def _moved(text: str) -> str:
    """The last op of the plan before all others: values would flow back."""
    document = json.loads(text)
    stages = document["decision"]["stages"]
    stages[0]["ops"], stages[-1]["ops"] = stages[-1]["ops"], stages[0]["ops"]
    return json.dumps(document)


def _lost(text: str) -> str:
    document = json.loads(text)
    del document["decision"]["stages"][0]["ops"][0]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text[: len(text) // 2], ("line",)),
        (_changed(version=2), ("version 2", "reads version 4", "make the plan again")),
        (_changed("decision", micro_rows=[5, 1]), ("decision.micro_rows",)),
    ],
)
def test_a_damaged_plan_file_is_refused_with_the_place(tmp_path, edit, words):
    path = edited(tmp_path, edit)
    with refused(PlanFileError, *words):
        compiled(net(), batch(), plan=path, loss_fn=F.cross_entropy)


def _in_two_stages(text: str) -> str:
    document = json.loads(text)
    first, last = document["decision"]["stages"]
    last["ops"].insert(0, first["ops"][0])
    return json.dumps(document)


@pytest.mark.parametrize(
    ("edit", "words"),
    [(_moved, "flow"), (_lost, "is in no stage"), (_in_two_stages, "is in stages 0 and 1")],
)
def test_a_plan_that_would_compute_something_else_is_refused(tmp_path, monkeypatch, edit, words):
    plan = planned("cpu:2", stages=2)
    path = edited(tmp_path, edit, plan)
    captured = {"loss_fn": F.cross_entropy, "plan": path}
    with refused(PlanError, words):
        autopart.plan(net(), "cpu:2", sample=batch(), costs="analytic", **captured)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda: planned("cpu:1", model=net(9)), "another model"),
        (lambda: planned("cpu:2"), "2, 1 run"),
    ],
)
def test_a_plan_made_for_something_else_is_refused_with_the_difference(plan, words):
    with refused(PlanError, "made for something else", words):
        compiled(net(), batch(), plan=plan(), loss_fn=F.cross_entropy)


def test_a_plan_made_for_another_sequence_length_is_refused():
    def of(width):
        sample = torch.randn(8, width, 4)
        return autopart.plan(Body(), "cpu:1", sample=sample, costs="analytic")

    with refused(PlanError, "other shapes"):
        compiled(Body(), torch.randn(8, 5, 4), plan=of(6))


def test_a_plan_of_another_torch_is_refused(tmp_path):
    with refused(PlanError, "another torch", "1.0.0"):
        path = edited(tmp_path, _changed("provenance", torch_version="1.0.0"))
        compiled(net(), batch(), plan=path, loss_fn=F.cross_entropy)


# -- state -------------------------------------------------------------------------------------------------------


def test_a_state_that_does_not_fit_changes_nothing():
    model = net()
    pipe = compiled(model, batch(), loss_fn=F.cross_entropy)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    zeros = {k: torch.zeros_like(v) for k, v in before.items()}
    wrong_shape = {**zeros, "2.weight": torch.zeros(3, 9)}
    missing = {k: v for k, v in zeros.items() if k != "2.bias"}
    for state, word in ((wrong_shape, "2.weight"), (missing, "2.bias"), ({**zeros, "x": before["0.bias"]}, "x")):
        with refused(UsageError, word):
            pipe.load_state_dict(state)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with refused(UsageError, "0.bias"):
        pipe.load_state_dict({**zeros, "0.bias": [0.0] * 8})
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_clipping_needs_a_positive_norm_type():
    pipe = compiled(net(), batch(), loss_fn=F.cross_entropy)
    with refused(UsageError, "norm_type is 0"):
        pipe.clip_grad_norm_(1.0, norm_type=0)

"""The front door: its signatures say every option, and a step can be seen, as simulated and as measured."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing

import pytest
import torch
from support.refusals import batch, net, planned, refused
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.ir.errors import PlanError, UsageError
from autopart.options import Options, read_options
from autopart.runtime.shared_group import default_timeout_s

OPTIONS = [field.name for field in dataclasses.fields(Options)]
FUNCTIONS = [autopart.compile, autopart.plan, autopart.verify]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option_is_a_keyword_with_a_type_and_a_default(function):
    types = typing.get_type_hints(function)
    first = inspect.signature(autopart.compile).parameters
    given = inspect.signature(function).parameters
    assert [name for name in given if name in OPTIONS] == OPTIONS
    for name in OPTIONS:
        assert given[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert given[name].default == first[name].default is not inspect.Parameter.empty
        assert types[name] == typing.get_type_hints(autopart.compile)[name] is not typing.Any
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in given.values())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option_is_documented_where_help_shows_it(function):
    for name in OPTIONS:
        assert f"\n    {name} " in (function.__doc__ or ""), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_unknown_option_is_pythons_own_error(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'stage'"):
        function(net(), "cpu:1", sample=batch(), stage=2)


def test_what_needs_a_sample_says_so():
    for function in (autopart.plan, autopart.verify):
        with refused(UsageError, "needs a sample", "sample=batch"):
            function(net(), "cpu:1", sample=None, loss_fn=F.cross_entropy)
        with pytest.raises(TypeError, match="sample"):
            function(net(), "cpu:1", loss_fn=F.cross_entropy)


def test_the_simulated_step_is_the_one_that_the_plan_was_chosen_for():
    plan = planned("cpu:2", stages=2, micro_batches=4)
    step = autopart.simulate(plan, net(), "cpu:2", sample=batch(), loss_fn=F.cross_entropy)
    assert step.step_ns == plan.step_ns
    done = {str(span.action) for span in step.spans if span.action.kind in ("F", "B")}
    assert done == {f"{stage}{kind}{micro}" for stage in (0, 1) for kind in "FB" for micro in range(4)}


def test_replicas_and_uneven_micro_batches_are_simulated_too(tmp_path):
    plan = planned("cpu:3", net(64), rows=9, stages=2, micro_batches=4, replicas=(2, 1), optimizer="sgd")
    model = net(64)
    step = autopart.simulate(plan, model, "cpu:3", sample=batch(9), loss_fn=F.cross_entropy, optimizer="sgd")
    assert step.step_ns == plan.step_ns
    assert {"R", "O"} <= {span.action.kind for span in step.spans}
    autopart.save_trace(step, tmp_path / "step.json")
    autopart.save_trace(step, tmp_path / "step.txt")
    assert "summing gradients over replicas" in (tmp_path / "step.json").read_text()
    assert "R" in (tmp_path / "step.txt").read_text()


def test_a_plan_of_another_model_is_not_simulated():
    with refused(PlanError):
        autopart.simulate(planned(), nn.Linear(4, 3), "cpu:2", sample=batch(), loss_fn=F.cross_entropy)


def test_a_step_is_written_for_a_viewer_and_as_text(tmp_path):
    with autopart.compile(net(), "cpu:1", sample=batch(), loss_fn=F.cross_entropy, costs="analytic") as pipe:
        step = pipe.timeline(batch())
    autopart.save_trace(step, tmp_path / "step.json", name="measured")
    autopart.save_trace(step, str(tmp_path / "step.txt"))
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace["otherData"]["name"] == "measured"
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == len(step.spans)
    # Not "begins with F": a slow machine has dead time before the first span.
    text = (tmp_path / "step.txt").read_text()
    assert text.startswith("rank 0 |")
    assert 0 < text.index("F0") < text.index("B0")
    for path, word in ((tmp_path / "step.png", ".json"), (tmp_path / "no/folder.json", "cannot write")):
        with refused(UsageError, word):
            autopart.save_trace(step, path)


def test_a_measured_step_is_a_training_step():
    model, same = net(), net()
    with autopart.compile(model, "cpu:1", sample=batch(), loss_fn=F.cross_entropy, costs="analytic") as pipe:
        pipe.timeline(batch())
        found = pipe.gradients()
    F.cross_entropy(same(batch()[0]), batch()[1]).backward()
    for name, parameter in same.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "10"])
def test_what_is_no_time_limit_is_refused(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="timeout is"):
        read_options(timeout=value)
    monkeypatch.setenv("AUTOPART_TIMEOUT_S", str(value))
    if value not in (True, "10"):
        with pytest.raises(UsageError, match="AUTOPART_TIMEOUT_S is"):
            default_timeout_s()

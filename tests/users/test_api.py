"""Tests of the public functions: the list of options, and simulated and measured steps."""

from __future__ import annotations

import dataclasses
import json
import logging
import traceback
import typing

import pytest
import torch
from support.languages.refusals import batch, net, planned, refused
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.ir.errors import AutopartError, PlanError, UsageError
from autopart.options import OPTIONS, Options, OptionsDict, read_options
from autopart.runtime.group.shared_group import default_timeout_s

FUNCTIONS = [autopart.compile, autopart.plan, autopart.verify]


def test_functions_and_record_have_the_same_options():
    taken = typing.get_type_hints(OptionsDict)
    assert list(taken) == list(OPTIONS) == [field.name for field in dataclasses.fields(Options)]
    assert typing.Any not in taken.values()
    assert not OptionsDict.__required_keys__


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option_is_a_typed_keyword(function):
    assert typing.get_type_hints(function)["options"] == typing.Unpack[OptionsDict]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option_is_in_the_docstring_of_the_function(function):
    for name in OPTIONS:
        assert f"\n    {name} " in (function.__doc__ or ""), name


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("stage", "did you mean stages=?"),
        ("micro_batch", "did you mean micro_batches=?"),
        ("samples", "did you mean sample=?"),
        ("n_microbatches", "micro_batches= is the number of micro-batches"),
        ("num_microbatches", "micro_batches="),
        ("chunks", "micro_batches="),
        ("data_parallel", "replicas="),
        ("device", "cluster="),
        ("micro_batch_size", "batch rows / micro_batch_size"),
        ("gradient_accumulation_steps", "the sample is the batch of all of them"),
        ("mixed_precision", 'precision= takes "fp32"'),
        ("compress", "drop it"),
        ("deepspeed", "the plan divides the model"),
        ("tensor_parallel_size", "tensor_parallel= is their number"),
        ("max_grad_norm", "pipe.clip_grad_norm_"),
        ("torch_compile", 'backend="inductor"'),
        ("wibble", "use one of loss_fn, stages"),
    ],
)
def test_an_unknown_option_is_refused_with_the_name_to_use(name, advice):
    with refused(UsageError, f"there is no option {name}=", advice):
        read_options(**{name: 2})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_unknown_option_is_refused_before_any_work(function):
    with refused(UsageError, "there is no option stage="):
        function(None, "cpu:1", sample=None, stage=2)


def test_none_means_the_default():
    assert read_options(**dict.fromkeys(OPTIONS)) == Options()


@pytest.mark.parametrize(
    ("precision", "read"),
    [(torch.bfloat16, "bf16"), ("bfloat16", "bf16"), ("bf16-mixed", "bf16"), (torch.float16, "fp16"), ("32", "fp32")],
)
def test_a_precision_may_be_named_as_torch_and_lightning_do(precision, read):
    assert read_options(precision=precision).precision == read


@pytest.mark.parametrize(("text", "count"), [("25MB", 25_000_000), ("4MiB", 4 << 20), ("1024", 1024), (512, 512)])
def test_a_number_of_bytes_may_be_a_text(text, count):
    assert read_options(bucket_bytes=text).bucket_bytes == count


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"bucket_bytes": "25 parrots"}, ("bucket_bytes is", '"4MiB"')),
        ({"bucket_bytes": 0}, ("bucket_bytes is 0", "use bytes")),
        ({"precision": "bf17"}, ("unknown precision 'bf17'", "did you mean 'bf16'?")),
        ({"precision": torch.float64}, ("unknown precision torch.float64", "fp32, bf16, fp16")),
        ({"zero": 3}, ("zero is 3", "only ZeRO-1 exists")),
        ({"zero": True}, ("zero is True", 'use 0, 1 or "auto"')),
        ({"loss_fn": nn.MSELoss}, ("loss_fn is <class", "MSELoss() (an instance)")),
        ({"schedule": "1f1b-deeep"}, ("unknown schedule", "did you mean '1f1b-deep'?")),
        ({"replicas": "8"}, ("replicas is '8'", "replicas=(2, 1)")),
        ({"cuts": [3]}, ("cuts is (3,)",)),
        ({"rows_axis": {"positions": "1"}}, ("rows_axis is", "map names of inputs to an axis")),
        ({"weights": ""}, ("weights is ''", "a safetensors file")),
        ({"stages": 1.5}, ("stages is 1.5",)),
        ({"stages": True}, ("stages is True",)),
        ({"micro_batches": "4"}, ("micro_batches is '4'",)),
        ({"micro_batches": -1}, ("micro_batches is -1",)),
        ({"loss_reduction": "max"}, ("loss_reduction 'max'", "token-mean")),
        ({"loss_fn": "mse"}, ("loss_fn is 'mse'",)),
        ({"seed": "x"}, ("seed is 'x'",)),
        ({"costs": "free"}, ("unknown costs 'free'", "compiled, or a function of your own")),
        ({"cuts": 3}, ("cuts is 3",)),
        ({"replicas": 0}, ("replicas is 0",)),
        ({"replicas": True}, ("replicas is True",)),
        ({"replicas": (2, 0)}, ("replicas is (2, 0)", "one for each stage")),
        ({"replicas": ()}, ("replicas is ()",)),
        ({"recompute": True}, ("recompute is True", '"auto", "off", "all"')),
        ({"together": 3}, ("together is 3",)),
        ({"together": [3]}, ("together is (3,)",)),
        ({"together": [("a", "")]}, ("together is (('a', ''),)",)),
        ({"pins": ["head"]}, ("pins is ['head']", "map module paths to stages")),
        ({"pins": {"head": "last"}}, ("pins is {'head': 'last'}",)),
        ({"pins": {"head": True}}, ("pins is",)),
    ],
)
def test_an_impossible_value_is_refused_with_a_possible_one(option, words):
    with refused(UsageError, *words):
        read_options(**option)


def test_options_that_are_sets_have_one_order_in_all_processes():
    names = {f"layer.{number}" for number in range(20)}
    assert read_options(cuts=names).cuts == tuple(sorted(names))


def test_an_axis_of_rows_may_be_none():
    assert read_options(rows_axis={"positions": 1, "weights": None}).rows_axis == {"positions": 1, "weights": None}


def test_launching_a_script_path_is_refused():
    with refused(UsageError, "launch was given a str ('train.py')", "torchrun --nproc-per-node 2 train.py"):
        autopart.launch("train.py", "cpu:2")


def test_compile_reports_its_phases_to_the_logger(caplog):
    with caplog.at_level(logging.INFO, "autopart"):
        planned("cpu:1", net(12))
    said = [record.getMessage() for record in caplog.records]
    assert "capturing the model ..." in said and any(line.startswith("searching a plan took ") for line in said)


def test_a_missing_sample_is_refused():
    for function in (autopart.plan, autopart.verify):
        with refused(UsageError, "needs a sample", "sample=batch"):
            function(net(), "cpu:1", sample=None, loss_fn=F.cross_entropy)
        with pytest.raises(TypeError, match="sample"):
            function(net(), "cpu:1", loss_fn=F.cross_entropy)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_error_of_ours_ends_in_the_users_line(function):
    for model, sample in ((net(), batch()), (object(), batch()), (net(), "text")):  # without a loss; no model; no batch
        with pytest.raises(AutopartError) as caught:
            function(model, "cpu:1", sample=sample, costs="analytic")
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[0].filename == __file__
        assert all(frame.name == "call" and frame.filename.endswith("ir/errors.py") for frame in frames[1:])
        assert len(frames) <= 2


def test_the_simulated_step_equals_that_of_the_plan():
    plan = planned("cpu:2", stages=2, micro_batches=4)
    step = autopart.simulate(plan, net(), "cpu:2", sample=batch(), loss_fn=F.cross_entropy)
    assert step.step_ns == plan.step_ns
    done = {str(span.action) for span in step.spans if span.action.kind in ("F", "B")}
    assert done == {f"{stage}{kind}{micro}" for stage in (0, 1) for kind in "FB" for micro in range(4)}


def test_replicas_and_uneven_micro_batches_can_be_simulated(tmp_path):
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


def test_a_step_is_saved_as_a_trace_and_as_text(tmp_path):
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
def test_an_invalid_timeout_is_refused(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="timeout is"):
        read_options(timeout=value)
    monkeypatch.setenv("AUTOPART_TIMEOUT_S", str(value))
    if value not in (True, "10"):
        with pytest.raises(UsageError, match="AUTOPART_TIMEOUT_S is"):
            default_timeout_s()

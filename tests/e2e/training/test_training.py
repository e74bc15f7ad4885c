"""Optimizers, clipping, evaluation, state and dropout over stages equal those of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.grids import sampled
from support.jobs.step_jobs import ALL
from support.jobs.training_jobs import (
    clipped,
    different_weights,
    disagreeing,
    dropout,
    evaluated,
    from_file,
    measured,
    optimize,
    predicted,
    reloaded,
    reopened,
    without_sample,
)

import autopart
from autopart.ir.errors import BatchError, PlanError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "schedule", "clip"),
    [
        ("tied", ["body.layers.0", "body.layers.2", "head"], "1f1b", 0.1),
        ("tied", 2, "gpipe", None),
        ("stack", 3, "gpipe", 5),
        ("shared_by_all", ["layers.1", "layers.2", "layers.3"], "1f1b", 0.1),
    ],
)
def test_optimizer_states_and_weights_equal_one_process(workers, name, split, schedule, clip):
    results = workers.run(optimize, name, split, schedule, 4, clip)
    for result in results:
        assert result["sent_whole"]
        assert result["moments"] <= 1e-4
        assert max(result["weights"].values()) <= 1e-5, result["weights"]
        for pair in result["losses"] + result["norms"]:
            assert pair[0] == pytest.approx(pair[1], rel=1e-5)
        assert result["losses"] == results[0]["losses"]


def test_copies_of_a_tied_parameter_stay_equal_bit_by_bit(workers):
    for name, cuts, tied, count in (
        ("tied", ["body.layers.0", "body.layers.2", "head"], "embedding.weight", 2),
        ("shared_by_all", ["layers.1", "layers.2", "layers.3"], "layers.0.weight", 4),
    ):
        results = workers.run(optimize, name, cuts, "1f1b", 3, None)
        copies = [result["held"][tied] for result in results if tied in result["held"]]
        assert len(copies) == count
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_parameters_are_on_one_rank_unless_they_are_tied(workers):
    results = workers.run(optimize, "stack", 4, "1f1b", 1, None)
    names = [name for result in results for name in result["held"]]
    assert sorted(names) == sorted(name for name, _ in ALL["stack"].model().named_parameters())


@pytest.mark.parametrize("kind", [2.0, pytest.param(1.0, marks=pytest.mark.slow), float("inf")])
def test_clipping_counts_every_parameter_once_as_torch_does(workers, kind):
    results = workers.run(clipped, "tied", kind)
    for result in results:
        assert result["norm"][0] == pytest.approx(result["norm"][1], rel=1e-5)
        assert result["error"] <= 1e-5, result["worst"]
        assert result["after"] == pytest.approx(0.01, rel=1e-3)  # gradients below the limit are unchanged
    assert len({result["norm"][0] for result in results}) == 1


@pytest.mark.parametrize(
    ("name", "stages"),
    sampled([("dropped", 4), ("batch_norm", 2), ("tied", 4), ("late_inputs", 3)]),
)
def test_evaluation_equals_one_process_and_changes_nothing(workers, name, stages):
    for result in workers.run(evaluated, name, stages):
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)
        assert result["unchanged"]
        assert result["again"] > 0
        assert result["training"]


def test_predict_returns_what_the_model_returns(pair):
    _check_prediction(pair, "gpt2", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet"])
def test_predict_on_four_stages_returns_what_the_model_returns(workers, name):
    _check_prediction(workers, name, 4)


def _check_prediction(pool, name, stages):
    for result in pool.run(predicted, name, stages):
        assert result["kind"][0] == result["kind"][1]
        assert result["error"] <= 1e-5
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)


@pytest.mark.parametrize("name", sampled(["batch_norm", "tied", "root_parameters"], 3))
def test_a_state_is_loaded_into_a_running_pipe_and_an_invalid_one_is_refused(workers, name):
    results = workers.run(reloaded, name)
    for result in results:
        assert "no.such" in result["refusal"]
        assert result["kept"]
        assert result["same"]
    assert results[0]["difference"].within(), results[0]["difference"]


def test_dropout_depends_on_step_and_seed_but_not_on_stages_or_recomputation(workers):
    losses, gradients, untouched = workers.run(dropout, 1, "1f1b", 5)[0]
    assert len(set(losses)) == 3
    assert untouched
    for stages, schedule, recompute in ((2, "gpipe", "off"), (4, "1f1b", "all")):
        for found, grads, alone in workers.run(dropout, stages, schedule, 5, 3, recompute):
            assert found == losses
            assert alone
            assert all(torch.allclose(grads[n], gradients[n], rtol=1e-5, atol=1e-8) for n in gradients)
    other = workers.run(dropout, 1, "1f1b", 6)[0][0]
    assert not set(other) & set(losses)


def test_a_pipe_without_a_sample_is_planned_at_its_first_step(workers):
    results = workers.run(without_sample, "stack")
    assert all(before == 8 for before, _ in results)
    assert results[0][1].within(), results[0][1]


def test_a_plan_file_runs_unchanged(workers, tmp_path):
    case = ALL["tied"]
    options = {"loss_fn": case.loss_fn, "stages": 3, "micro_batches": 2, "costs": "analytic", "schedule": "gpipe"}
    options |= {"replicas": 1}  # one rank per stage
    plan = autopart.plan(case.model(), "cpu:4", sample=case.batch(8), **options)
    path = tmp_path / "plan.json"
    autopart.save_plan(plan, path)
    results = workers.run(from_file, "tied", str(path))
    assert all(ran == plan for _, ran in results)
    assert results[0][0].within(), results[0][0]


def test_pipes_can_be_closed_and_compiled_again(workers):
    losses = workers.run(reopened, "stack", 3)[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [("model", PlanError, "different models"), ("batch", BatchError, "shapes")],
)
def test_disagreeing_ranks_are_refused_before_data_is_sent(workers, what, kind, words):
    with pytest.raises(kind, match=words):
        workers.run(disagreeing, what)


@pytest.mark.filterwarnings("ignore:the ranks built different weights")
def test_ranks_with_different_initial_weights_use_those_of_rank_0(workers):
    difference = workers.run(different_weights)[0]
    assert difference.within(), difference


def test_every_rank_gets_the_actions_of_all_ranks_in_a_timeline(workers):
    results = workers.run(measured, "tied")
    assert all(result["spans"] == results[0]["spans"] for result in results)
    spans = results[0]["spans"]
    starts = [start for _, _, start, _ in spans]
    assert starts == sorted(starts)
    for rank, actions in enumerate(results[0]["actions"]):
        own = sorted((start, end, action) for who, action, start, end in spans if who == rank)
        assert [action for _, _, action in own] == actions
        assert all(0 <= start <= end for start, end, _ in own)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))

"""Training that goes on: a second `train()`, a resume inside an epoch, a run that was ended at any step.

The plain Trainer is measured in each test: what it does is what a pipeline has to do.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from support.trainer_runs import Piped, Watched, differs, interrupted, left, made, resumable
from support.workers import Workers

from autopart.ir.errors import UsageError


def trained(folder: str, args: dict[str, Any], pipeline: dict[str, Any], resume: str | None, again: bool) -> Any:
    """Train on this rank, as a script under a launcher does, once or twice; return what is left."""
    trainer = made(Piped, Path(folder), args, pipeline={"cluster": "cpu:2", **pipeline})
    trainer.train(resume_from_checkpoint=resume)
    if again:
        trainer.train()
    return left(trainer)


SHARED = ("optimizer", "moments")
"""What each of two ranks has a part of."""


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"max_steps": 3}, marks=pytest.mark.slow),
        {"num_train_epochs": 1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
    ],
)
def test_a_second_train_goes_on_as_a_plain_trainer_does(tmp_path, args):
    found = []
    for kind in (Watched, Piped):
        trainer = made(kind, tmp_path / kind.__name__, args)
        trainer.train()
        first = left(trainer)
        trainer.train()
        found.append((first, left(trainer)))
    (plain, after), (mine, mine_after) = found
    assert differs(mine, plain) == differs(mine_after, after) == []
    assert (
        after["moments"]["head.weight"]["step"] == 2 * plain["moments"]["head.weight"]["step"]
    )  # measured: it goes on


def test_a_second_train_with_another_plan_is_refused(tmp_path):
    trainer = made(Piped, tmp_path, {"max_steps": 1, "save_strategy": "steps", "save_steps": 1})
    trainer.train()
    trainer.model = made(Piped, tmp_path).model  # other parameters, as other ranks would have after another plan
    trainer.model_wrapped = trainer.model
    with pytest.raises(UsageError, match="second train"):
        trainer.train()
    trainer.optimizer = None
    trainer.train(resume_from_checkpoint=True)


def check(tmp_path: Path, seed: int) -> None:
    """Compare a run that was ended and resumed with a plain one that was, and with one that was not."""
    draw = random.Random(seed)
    args = resumable(draw)
    whole = made(Watched, tmp_path / "whole", args, rows=11)
    whole.train()
    steps = whole.state.global_step
    at = draw.randint(max(args["save_steps"], steps // 2), steps)  # mostly inside a later epoch
    plain = left(interrupted(Watched, tmp_path / "plain", args, at))
    mine = left(interrupted(Piped, tmp_path / "mine", args, at))
    assert differs(mine, plain) == [], args
    if not args["ignore_data_skip"] and args["train_sampling_strategy"] != "group_by_length":  # which draws anew
        expected = left(whole)
        assert differs(mine["weights"], expected["weights"]) == [], args
        assert mine["batches"] == expected["batches"][-len(mine["batches"]) :] if mine["batches"] else True


def test_a_run_that_was_ended_goes_on_with_the_batches_of_a_plain_one(tmp_path):
    check(tmp_path, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 14, *range(20, 80)])
def test_many_runs_that_were_ended_go_on_with_the_batches_of_plain_ones(tmp_path, seed):
    check(tmp_path, seed)


@pytest.mark.slow
def test_two_ranks_resume_inside_an_epoch_and_train_a_second_time_as_a_plain_trainer(tmp_path):
    args = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 5, "per_device_train_batch_size": 3,
            "eval_strategy": "steps", "eval_steps": 2, "include_num_input_tokens_seen": "all"}  # fmt: skip
    plain = made(Watched, tmp_path / "plain", args)
    plain.train()
    plain.train()
    again = left(plain)
    resumed = made(Watched, tmp_path / "plain", args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "plain/checkpoint-5"))
    with Workers(2, timeout=240) as workers:
        mine = str(tmp_path / "mine")
        runs = [
            (again, workers.run(trained, mine, args, {"stages": 2}, None, True)),
            (
                left(resumed),
                workers.run(trained, mine, args, {"cuts": ["norm"]}, f"{mine}/checkpoint-5", False),
            ),
        ]
    for expected, ranks in runs:
        for rank in ranks:
            kept = expected.keys() - set(SHARED)
            assert differs({n: rank[n] for n in kept}, {n: expected[n] for n in kept}) == []
        moments = {**ranks[0]["moments"], **ranks[1]["moments"]}
        assert differs(moments, expected["moments"]) == []
    assert [len(rank["moments"]) for _, ranks in runs for rank in ranks] == [7, 0, 3, 4]  # a rank without any, and both
    one = made(Piped, tmp_path / "mine", args)
    one.train(resume_from_checkpoint=f"{mine}/checkpoint-5")
    found, expected = left(one), runs[1][0]
    assert differs(found["weights"], expected["weights"]) == [] and found["batches"] == expected["batches"]


def test_a_checkpoint_of_weights_alone_starts_a_new_optimizer_as_a_plain_trainer_does(tmp_path):
    args = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    plain, mine = (left(interrupted(kind, tmp_path / kind.__name__, args, 4)) for kind in (Watched, Piped))
    assert differs(mine, plain) == []

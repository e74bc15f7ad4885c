"""`autopart.AveragedModel` against torch's on the model in one process, also after a checkpoint under another plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.jobs import averaged_jobs as jobs
from support.workers import Workers
from torch import nn

import autopart
from autopart.ir.errors import UsageError
from autopart.runtime.masters import CAN_WIDEN

STAGES = {"cluster": "cpu:2", "stages": 2, "cuts": ["2"], "micro_batches": 1}
LOSS_ALONE = {"cluster": "cpu:2", "stages": 2, "micro_batches": 1}
"""The second rank has no parameter."""
ZERO = {"cluster": "cpu:2", "stages": 1, "replicas": 2, "zero": 1, "micro_batches": 1, "sync_batchnorm": True}


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("swa", [STAGES, ZERO]),
        ("ema", [ZERO, LOSS_ALONE]),
        ("own", [LOSS_ALONE, ZERO]),
    ],
    ids=["swa-stages-zero", "ema-zero-loss", "own-loss-zero"],
)
def test_averages_equal_those_of_torch_before_and_after_another_plan(
    pair: Workers, tmp_path: Path, kind: str, plans: list[dict[str, object]]
) -> None:
    expected = jobs.plainly_averaged(kind)
    for found in pair.run(jobs.averaged, str(tmp_path), kind, plans):
        for (count, averages, trained, loss), (right, right_averages, right_trained, right_loss) in zip(
            found, expected, strict=True
        ):
            assert count == right
            torch.testing.assert_close(averages, dict(right_averages), rtol=1e-11, atol=1e-13)
            torch.testing.assert_close(trained, dict(right_trained), rtol=1e-11, atol=1e-13)
            assert loss == pytest.approx(right_loss, rel=1e-11)
            assert not torch.allclose(averages["4.weight"], trained["4.weight"])


@pytest.mark.parametrize("options", [STAGES, ZERO], ids=["stages", "zero"])
def test_what_would_train_the_averages_is_refused_and_the_trained_values_come_back(
    pair: Workers, options: dict[str, object]
) -> None:
    for said, unchanged, left in pair.run(jobs.refused, options):
        calls = ["pipe.step", "pipe.load", "update_parameters", "applied"]
        assert said[:4] == [f"{call} is called inside averaged.applied()" for call in calls]
        assert said[4].endswith("was written to inside averaged.applied()") and "AveragedModel" in said[5]
        assert unchanged and left


@pytest.mark.skipif(not CAN_WIDEN, reason="masters need torch 2.12")
def test_masters_are_averaged_in_fp32_and_training_goes_on_to_the_bit() -> None:
    runs = []
    for looked in (False, True):
        options = {"sample": jobs.half(0), "loss_fn": jobs.LOSS, "costs": "analytic", "master_weights": True}
        with autopart.compile(jobs.net().bfloat16(), "cpu:1", **options) as pipe:
            averages, optimizer = autopart.AveragedModel(pipe), jobs.optimizer_of(pipe.parameters())
            seen: list[torch.Tensor] = []
            for step in range(4):
                pipe.step(jobs.half(step))
                optimizer.step()
                averages.update_parameters()
                seen.append(dict(pipe.named_parameters())["0.weight"].detach().clone())
                if looked:
                    with averages.applied():
                        inside = pipe.state_dict()["0.weight"]
                        assert torch.equal(inside, averages.tensors()["0.weight"].bfloat16())
            assert averages.tensors()["0.weight"].dtype == torch.float32
            torch.testing.assert_close(averages.tensors()["0.weight"], torch.stack(seen).mean(0))
            runs.append(dict(pipe.state_dict()))
    assert all(torch.equal(tensor, runs[1][name]) for name, tensor in runs[0].items())


def test_a_pipe_that_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(UsageError, match="given a Linear"):
        autopart.AveragedModel(nn.Linear(2, 2))  # type: ignore[arg-type]
    with autopart.compile(jobs.net(), "cpu:1", sample=jobs.batch(0), loss_fn=jobs.LOSS, costs="analytic") as pipe:
        with pytest.raises(UsageError, match="both given"):
            autopart.AveragedModel(pipe, **jobs.averaging("ema"), **jobs.averaging("own"))
        averages = [autopart.AveragedModel(pipe) for _ in range(3)]
        assert [name for name, each in pipe.companions.items() if each in averages] == [
            "averages", "averages-2", "averages-3",
        ]  # fmt: skip
        inputs = jobs.batch(0)[0]
        with averages[0].applied():
            expected = pipe.predict(inputs)
        assert torch.equal(averages[0].eval()(inputs), expected)
        with pytest.raises(UsageError, match="another object"):
            averages[0].update_parameters(pipe.model)  # type: ignore[arg-type]

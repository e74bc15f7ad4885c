"""`autopart.AveragedModel` against torch's on the model in one process, also after a checkpoint under another plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import Workers
from torch import nn
from torch.optim import swa_utils

import autopart
from autopart.ir.errors import UsageError
from autopart.runtime.masters import CAN_WIDEN

LOSS = nn.functional.cross_entropy
Kept = tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], float]
"""Updates of the averages, the averaged state, the trained state, and the loss in eval mode under the averages."""


def net(seed: int = 0) -> nn.Module:
    """Return a model in fp64 with batch statistics and a frozen parameter."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    made[2].bias.requires_grad_(False)
    return made


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)


def half(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step in bfloat16."""
    return batch(step)[0].bfloat16(), batch(step)[1]


def averaging(kind: str) -> dict[str, Any]:
    """Return the options of AveragedModel for one way of averaging."""
    return {
        "swa": {},
        "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8), "use_buffers": True},
        "own": {"avg_fn": lambda average, value, count: average * 0.75 + value * 0.25},
    }[kind]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer without state that a checkpoint would have to carry."""
    return torch.optim.SGD(parameters, lr=0.2)


def plainly_averaged(kind: str) -> list[Kept]:
    """Train 3 steps, then 3 more, in one process with torch's AveragedModel; return what there is after each three."""
    model = net()
    averaged, optimizer = swa_utils.AveragedModel(model, **averaging(kind)), optimizer_of(model.parameters())
    found: list[Kept] = []
    for step in range(6):
        optimizer.zero_grad()
        LOSS(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        averaged.update_parameters(model)
        if step % 3 == 2:
            averaged.module.eval()
            with torch.no_grad():
                loss = LOSS(averaged.module(batch(9)[0]), batch(9)[1]).item()
            states = ({n: t.clone() for n, t in m.state_dict().items()} for m in (averaged.module, model))
            found.append((int(averaged.n_averaged), *states, loss))
    return found


def averaged(folder: str, kind: str, plans: list[dict[str, Any]]) -> list[Kept]:
    """Train 3 steps under each of two plans, with a checkpoint between them; return what there is after each three."""
    found: list[Kept] = []
    for number, options in enumerate(plans):
        model = net(number)
        with autopart.compile(model, sample=batch(0), loss_fn=LOSS, costs="analytic", **options) as pipe:
            averages, optimizer = autopart.AveragedModel(pipe, **averaging(kind)), optimizer_of(pipe.parameters())
            if number:
                pipe.load(folder, optimizer)
            for step in range(3 * number, 3 * number + 3):
                optimizer.zero_grad()
                pipe.step(batch(step))
                optimizer.step()
                averages.update_parameters(pipe)
            with averages.applied():
                loss, state = pipe.eval_loss(batch(9)).item(), dict(pipe.state_dict())
            pipe.save(folder, optimizer)
            found.append((int(averages.n_averaged), state, dict(pipe.state_dict()), loss))
    return found


def refused(options: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """Return what is refused inside and outside the block, whether training goes on with the trained values after it,
    and whether a pipe that is closed inside leaves the averages in the model."""
    said = []
    with autopart.compile(net(), sample=batch(0), loss_fn=LOSS, costs="analytic", **options) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        averages = autopart.AveragedModel(pipe)
        averages.update_parameters()
        pipe.step(batch(0))
        optimizer.step()
        trained = dict(pipe.state_dict())
        try:
            with averages.applied():
                for call in (
                    lambda: pipe.step(batch(1)),
                    lambda: pipe.load("nowhere"),
                    averages.update_parameters,
                    averages.applied().__enter__,
                ):
                    try:
                        call()
                    except UsageError as error:
                        said.append(error.what)
                optimizer.step()
        except UsageError as error:
            said.append(error.what)
        try:
            pipe.adopt(pipe.plan)
        except UsageError as error:
            said.append(error.what)
        unchanged = all(torch.equal(tensor, trained[name]) for name, tensor in pipe.state_dict().items())
        pipe.step(batch(1))
        with averages.applied():
            pipe.sync_model()
        with averages.applied():
            pipe.close()
        start = net().state_dict()
        averaged = {name: tensor for name, tensor in pipe.model.state_dict().items() if "num_" not in name}
        return said, unchanged, all(torch.equal(tensor, start[name]) for name, tensor in averaged.items())


# -- tests -----------------------------------------------------------------------------------------------------------


STAGES = {"cluster": "cpu:2", "stages": 2, "cuts": ["2"], "micro_batches": 1}
LOSS_ALONE = {"cluster": "cpu:2", "stages": 2, "micro_batches": 1}
"""The second rank has no parameter."""
ZERO = {"cluster": "cpu:2", "stages": 1, "replicas": 2, "zero": 1, "micro_batches": 1, "sync_batchnorm": True}


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("swa", [STAGES, ZERO]),
        ("ema", [ZERO, LOSS_ALONE]),
        pytest.param("own", [LOSS_ALONE, ZERO], marks=pytest.mark.slow),
    ],
    ids=["swa-stages-zero", "ema-zero-loss", "own-loss-zero"],
)
def test_averages_equal_those_of_torch_before_and_after_another_plan(
    pair: Workers, tmp_path: Path, kind: str, plans: list[dict[str, object]]
) -> None:
    expected = plainly_averaged(kind)
    for found in pair.run(averaged, str(tmp_path), kind, plans):
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
    for said, unchanged, left in pair.run(refused, options):
        calls = ["pipe.step", "pipe.load", "update_parameters", "applied"]
        assert said[:4] == [f"{call} is called inside averaged.applied()" for call in calls]
        assert said[4].endswith("was written to inside averaged.applied()") and "AveragedModel" in said[5]
        assert unchanged and left


@pytest.mark.skipif(not CAN_WIDEN, reason="masters need torch 2.12")
def test_masters_are_averaged_in_fp32_and_training_goes_on_to_the_bit() -> None:
    runs = []
    for looked in (False, True):
        options = {"sample": half(0), "loss_fn": LOSS, "costs": "analytic", "master_weights": True}
        with autopart.compile(net().bfloat16(), "cpu:1", **options) as pipe:
            averages, optimizer = autopart.AveragedModel(pipe), optimizer_of(pipe.parameters())
            seen: list[torch.Tensor] = []
            for step in range(4):
                pipe.step(half(step))
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
    with autopart.compile(net(), "cpu:1", sample=batch(0), loss_fn=LOSS, costs="analytic") as pipe:
        with pytest.raises(UsageError, match="both given"):
            autopart.AveragedModel(pipe, **averaging("ema"), **averaging("own"))
        averages = [autopart.AveragedModel(pipe) for _ in range(3)]
        assert [name for name, each in pipe.companions.items() if each in averages] == [
            "averages", "averages-2", "averages-3",
        ]  # fmt: skip
        inputs = batch(0)[0]
        with averages[0].applied():
            expected = pipe.predict(inputs)
        assert torch.equal(averages[0].eval()(inputs), expected)
        with pytest.raises(UsageError, match="another object"):
            averages[0].update_parameters(pipe.model)  # type: ignore[arg-type]

"""What scripts for plain torch call on a pipe: it works as in torch, or an error says what to call instead."""

from __future__ import annotations

import copy
import io
import traceback
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import misleading_jobs as jobs
from support.models.misleading_models import ROWS, WIDTH, Net, Normed
from support.workers import Workers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autopart
from autopart.capture.python.guards import CaptureWarning
from autopart.ir.errors import AutopartError, CheckpointError, RefusedError, UsageError


class Color(Enum):
    RED = "red"


@pytest.fixture(scope="module")
def pipe() -> Any:
    with autopart.compile(Normed(), "cpu:1", sample=ROWS, micro_batches=1, costs="analytic") as pipe:
        yield pipe


def test_backward_on_a_loss_says_that_the_step_did_it(pipe: autopart.Pipe) -> None:
    loss = pipe.step(ROWS)
    for tensor in (loss, loss / 4):
        with pytest.raises(UsageError, match="backward") as caught:
            tensor.backward()
        assert "pipe.step(batch)" in caught.value.fix
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=True)["loss"]) is torch.Tensor


def test_functions_of_torch_take_keywords_as_before_while_a_pipe_is_open(pipe: autopart.Pipe) -> None:
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(torch.autograd.grad(outputs=(x * x).sum(), inputs=x)[0], 2 * x.detach())
    torch.autograd.backward(tensors=(x * x).sum())
    net = nn.Linear(2, 2)
    net(torch.ones(2)).sum().backward()
    optimizer = torch.optim.SGD(params=net.parameters(), lr=0.1)
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    net.load_state_dict(state_dict=net.state_dict(), strict=True)
    optimizer.step(closure=None)
    torch.nn.utils.clip_grad_norm_(parameters=net.parameters(), max_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.unscale_(optimizer=optimizer)
    scaler.step(optimizer=optimizer)
    torch.optim.swa_utils.AveragedModel(net).update_parameters(model=net)
    copy.deepcopy(x=net)
    optimizer.zero_grad(set_to_none=True)


def test_a_pipe_is_not_called_and_not_moved(pipe: autopart.Pipe) -> None:
    with pytest.raises(UsageError, match="not called") as caught:
        pipe(ROWS)
    assert "pipe.step(batch)" in caught.value.fix
    with pytest.raises(UsageError, match="no attribute 'to'") as caught:
        pipe.to(torch.bfloat16)
    assert "before compile" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("module", "pipe.model"),
        ("no_sync", "optimizer.step() every n-th time"),
        ("norm", "pipe.model.norm is the model's own"),
        ("_modules", "pass pipe.model"),
        ("evaluate", "pipe.eval_loss(batch)"),
        ("nonsense", "docs/pipe.md"),
    ],
)
def test_an_attribute_of_other_wrappers_says_what_to_use_instead(pipe: autopart.Pipe, name: str, instead: str) -> None:
    assert not hasattr(pipe, name)
    with pytest.raises(UsageError, match=f"no attribute '{name}'") as caught:
        getattr(pipe, name)
    assert instead in caught.value.fix


def test_evaluation_runs_inside_inference_mode_and_a_step_without_gradients_is_refused(pipe: autopart.Pipe) -> None:
    expected = pipe.eval_loss(ROWS)
    with torch.inference_mode():
        rows = ROWS[:4].clone()  # an inference tensor, as a loader makes it there
        assert pipe.eval_loss(ROWS) == expected and pipe.predict(rows).isfinite()
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(UsageError, match="gradients are turned off") as caught:
            pipe.step(ROWS)
        assert "pipe.eval_loss(batch)" in caught.value.fix


def test_torchscript_and_arrays_are_refused_with_what_to_pass() -> None:
    with pytest.warns(DeprecationWarning), pytest.raises(UsageError, match="TorchScript") as caught:
        autopart.compile(torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4)), "cpu:1", sample=torch.zeros(2, 4))
    assert "torch.jit.trace was given" in caught.value.fix
    with pytest.raises(UsageError, match="ndarray") as caught:
        autopart.compile(Net(), "cpu:1", sample=ROWS.numpy())
    assert caught.value.fix == "pass torch.as_tensor(x)"
    with pytest.warns(DeprecationWarning), pytest.raises(UsageError, match="module 0 is a TorchScript") as caught:
        part = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))
        autopart.compile(nn.Sequential(part, nn.Linear(4, 1)), "cpu:1", sample=torch.zeros(2, 4))
    assert "torch.jit.trace was given" in caught.value.fix
    for leaf, fix in ((Path("a"), "str(x)"), (Color.RED, "x.value")):
        with pytest.raises(UsageError, match="input x is a") as caught:
            autopart.compile(Net(), "cpu:1", sample={"input": ROWS, "x": leaf})
        assert fix in caught.value.fix


def test_a_rank_whose_batches_do_not_count_is_warned_of_once(pair: Workers) -> None:
    assert pair.run(jobs.other_batches) == [[0, 0, 1], [0, 0, 0]]


def test_wrapping_a_pipe_or_a_wrapped_model_is_refused(pipe: autopart.Pipe) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="a pipe is wrapped in DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(pipe)  # type: ignore[arg-type]
        wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(Net()))
        sharded = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()
    for model, name in ((wrapped, "DistributedDataParallel"), (sharded, "FSDP")):
        with pytest.raises(UsageError, match=f"the model is wrapped in {name}") as caught:
            autopart.compile(model, "cpu:1", sample=ROWS)
    assert caught.value.fix


def test_the_own_way_of_a_model_to_be_saved_is_called_or_missed(pipe: autopart.Pipe, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="Normed has no save_pretrained") as caught:
        pipe.save_pretrained(tmp_path)
    assert "pipe.save(folder)" in caught.value.fix

    class Saved(Normed):
        def save_pretrained(self, folder: Any, shards: int = 1) -> None:
            torch.save((self.state_dict(), shards), folder / "state")

    with autopart.compile(Saved(), "cpu:1", sample=ROWS, micro_batches=1, costs="analytic") as own:
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        own.step(ROWS)
        optimizer.step()
        own.save_pretrained(tmp_path, shards=2)
        state, shards = torch.load(tmp_path / "state")
        assert shards == 2 and all(torch.equal(state[name], tensor) for name, tensor in own.state_dict().items())
        with pytest.raises(RuntimeError, match="does not exist"):
            own.save_pretrained(tmp_path / "none")


def test_a_pipe_is_neither_saved_nor_copied(pipe: autopart.Pipe) -> None:
    for copied in (lambda: torch.save(pipe, io.BytesIO()), lambda: copy.deepcopy(pipe)):
        with pytest.raises(UsageError, match="neither copied nor saved") as caught:
            copied()
        assert "pipe.state_dict()" in caught.value.fix


def test_what_a_module_tells_of_itself_a_pipe_tells_too(pipe: autopart.Pipe) -> None:
    assert pipe.world_size == 1
    assert pipe.training is True and pipe.eval().training is False and pipe.train().training is True
    assert {name for name, _ in pipe.named_buffers()} == {name for name, _ in pipe.model.named_buffers()}


def test_our_own_errors_are_raised_without_our_frames(pipe: autopart.Pipe) -> None:
    with pytest.raises(UsageError) as caught:
        pipe.step(object())
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3
    with pytest.raises(UsageError) as caught:
        pipe.data_rows(-1)
    assert "a batch of -1 rows" in caught.value.what
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3


def test_train_eval_and_zero_grad_work_as_those_of_a_module(pipe: autopart.Pipe) -> None:
    assert pipe.eval() is pipe and not pipe.model.training
    before = pipe.state_dict()["norm.running_mean"]
    pipe.step(ROWS)
    assert pipe.state_dict()["norm.running_mean"].equal(before)
    assert pipe.train().model.training
    pipe.step(ROWS)
    assert not pipe.state_dict()["norm.running_mean"].equal(before)
    pipe.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in pipe.parameters())
    pipe.zero_grad()
    assert all(p.grad is None for p in pipe.parameters())


def test_converting_the_model_afterwards_is_refused_unless_it_changes_nothing() -> None:
    model = Net()
    with autopart.compile(model, "cpu:1", sample=ROWS, micro_batches=2, costs="analytic") as pipe:
        model.float()
        pipe.step(ROWS)
        model.double()
        with pytest.raises(RefusedError, match=r"is of torch.float64, and was of torch.float32"):
            pipe.step(ROWS)
        model.float()
        pipe.step(ROWS)


def test_what_was_put_into_the_model_is_neither_reported_as_trained_nor_overwritten() -> None:
    model = Net()
    pipe = autopart.compile(model, "cpu:1", sample=ROWS, micro_batches=2, costs="analytic")
    model.l[1].weight = nn.Parameter(torch.full((WIDTH, WIDTH), 3.0))
    for call in (pipe.state_dict, pipe.sync_model, pipe.gradients):
        with pytest.raises(RefusedError, match=r"parameter l.1.weight was replaced"):
            call()
    pipe.close()
    assert (model.l[1].weight == 3.0).all()


def test_the_norm_of_gradients_has_their_precision() -> None:
    model = Net().double()
    with autopart.compile(model, "cpu:1", sample=ROWS.double(), micro_batches=2, costs="analytic") as pipe:
        pipe.step(ROWS.double())
        assert pipe.clip_grad_norm_(1.0).dtype == torch.float64


def test_an_optimizer_that_needs_a_closure_is_refused(pair: Workers) -> None:
    with pytest.raises(AutopartError, match="LBFGS needs a closure"):
        autopart.compile(Net(), "cpu:1", sample=ROWS, optimizer=torch.optim.LBFGS, costs="analytic")
    for error in pair.run(jobs.closure_optimizer):
        assert type(error) is UsageError and "LBFGS cannot update" in error.what


def test_a_cut_at_a_module_without_an_op_of_its_own_says_so() -> None:
    with pytest.raises(UsageError, match="module 'positions' has no op of its own"):
        autopart.plan(Placed(), "cpu:2", sample=torch.randn(8, 4), cuts=["positions"], costs="analytic")


def test_a_compiled_model_is_unwrapped_with_a_warning() -> None:
    plain = Net()
    in_place = Net()
    in_place.compile(backend="eager")
    for model in (torch.compile(plain, backend="eager"), in_place):
        with pytest.warns(CaptureWarning, match='backend="inductor"') as seen:
            pipe = autopart.compile(model, "cpu:1", sample=ROWS, micro_batches=1, costs="analytic")
        with pipe:
            assert seen[0].filename == __file__
            assert {name for name, _ in pipe.named_parameters()} == {name for name, _ in plain.named_parameters()}


def test_a_pipe_is_not_given_to_torch_compile(pipe: autopart.Pipe) -> None:
    with pytest.raises(UsageError, match=r"a pipe is given to torch\.compile") as caught:
        torch.compile(pipe, backend="eager")  # type: ignore[call-overload]
    assert 'backend="inductor"' in caught.value.fix


def test_a_gradient_scaler_is_refused_before_it_divides_gradients(pipe: autopart.Pipe) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler, other = torch.amp.GradScaler("cpu"), nn.Linear(2, 2)
    scaler.scale(pipe.step(ROWS))
    before = {name: gradient.clone() for name, gradient in pipe.gradients().items() if gradient is not None}
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(UsageError, match="GradScaler") as caught:
            call(optimizer)
        assert 'precision="fp16"' in caught.value.fix
    found = pipe.gradients()
    assert before and all(torch.equal(found[name], gradient) for name, gradient in before.items())  # type: ignore[arg-type]
    torch.amp.GradScaler("cpu", enabled=False).step(torch.optim.SGD(pipe.parameters(), lr=0.0))
    scaler.scale(other(torch.ones(2)).sum()).backward()
    scaler.step(torch.optim.SGD(other.parameters(), lr=0.1))  # of another model


def test_the_first_loss_that_is_not_finite_is_told_once() -> None:
    with autopart.compile(Net(), "cpu:1", sample=ROWS, micro_batches=1, costs="analytic") as pipe:
        pipe.step(ROWS)
        with pytest.warns(autopart.NonFiniteWarning, match="the loss of step 2 is nan") as seen:
            pipe.step(ROWS * float("nan"))
            pipe.step(ROWS * float("nan"))
        assert len(seen) == 1 and seen[0].filename == __file__ and 'non_finite="raise"' in str(seen[0].message)


def test_calls_of_torch_on_a_part_of_the_model_are_told_once(pair: Workers) -> None:
    """The state of a model whose values other ranks have, and a norm over a part; nothing is left after close."""
    for told, quiet, left in pair.run(jobs.noticed):
        assert [("pipe.state_dict()" in text, "pipe.clip_grad_norm_" in text) for text in told] == [
            (True, False), (False, True)
        ]  # fmt: skip
        assert quiet == [] and left


def test_a_file_is_no_folder_of_checkpoints(pipe: autopart.Pipe, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(pipe.state_dict(), file)
    with pytest.raises(CheckpointError, match="it is a file, and a checkpoint is a folder") as caught:
        pipe.load(file)
    assert "pipe.load_state_dict(torch.load(file))" in caught.value.fix
    assert pipe.load_state_dict(torch.load(file)) == ([], [])
    with pytest.raises(CheckpointError, match=r"model\.pt is a file, and a checkpoint is a folder") as caught:
        pipe.save(file)
    assert str(tmp_path / "model") in caught.value.fix
    assert pipe.save(tmp_path / "model").is_dir()


def test_auto_leaves_an_option_to_the_planner() -> None:
    wishes: Any = dict.fromkeys(("stages", "micro_batches", "replicas"), "auto")
    found = autopart.plan(Net(), "cpu:2", sample=ROWS, costs="analytic", **wishes)
    assert found.decision == autopart.plan(Net(), "cpu:2", sample=ROWS, costs="analytic").decision


def test_a_lightning_module_is_told_to_pass_its_network() -> None:
    class LightningModule(nn.Module):
        pass

    LightningModule.__module__ = "lightning.pytorch.core.module"

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = Net()

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            return self.backbone(batch)

    with pytest.raises(UsageError, match="Lit is a LightningModule") as caught:
        autopart.compile(Lit(), "cpu:1", sample=ROWS)
    assert "autopart.compile(module.backbone" in caught.value.fix and "loss_fn=" in caught.value.fix


class Positions(nn.Module):
    """Its result depends on nothing that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 4))

    def forward(self) -> torch.Tensor:
        return torch.cos(self.table)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions, self.last = nn.Linear(4, 4), Positions(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.positions()).square().mean()

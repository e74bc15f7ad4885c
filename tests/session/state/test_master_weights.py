"""fp32 masters of parameters in half precision: what the optimizer drives, and what becomes of the model's own."""

from __future__ import annotations

import copy

import pytest
import torch
from support.jobs.state.master_weight_jobs import (
    batch,
    by_hand,
    compiled,
    differing,
    loss_fn,
    model,
    optimizer,
    trained,
)

import autopart
from autopart.ir.errors import RefusedError, UsageError

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a later torch")


def test_ten_steps_are_those_of_masters_kept_by_hand() -> None:
    wrong, left, masters = trained(stages=1)
    assert (wrong, left) == ([], []) and {master.dtype for master in masters.values()} == {torch.float32}


def test_who_writes_to_the_model_is_told_and_not_overwritten() -> None:
    own = model()
    stale = optimizer(own.parameters())
    with compiled(own, "cpu:1") as pipe:
        pipe.step(batch())
        with pytest.raises(UsageError, match=r"updates 0\.weight of the model, which has a master") as caught:
            stale.step()
        assert "pipe.parameters()" in caught.value.fix
        with torch.no_grad():
            own[0].weight.copy_(own[0].weight.flip(0).clone())
        for call in (lambda: pipe.step(batch()), lambda: pipe.eval_loss(batch()), pipe.state_dict):
            with pytest.raises(RefusedError, match=r"0\.weight was written to in the model"):
                call()
        pipe.sync_model()
        assert torch.equal(own[0].weight, model()[0].weight)
        with torch.no_grad():
            own[4].bias.fill_(1.0)
        pipe.load_state_dict(own.state_dict())
        pipe.step(batch())
        assert (dict(pipe.named_parameters())["4.bias"] == 1.0).all() and (own[4].bias == 1.0).all()
        own[1].weight.grad = torch.ones_like(own[1].weight)
        with pytest.raises(RefusedError, match=r"1\.weight has a gradient in the model"):
            pipe.step(batch())
        own[1].weight.grad = None
        with torch.no_grad():
            own[1].weight.zero_()
        with pytest.warns(UserWarning, match=r"1\.weight was written to"):
            pipe.close()
    assert own[1].weight.any()


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["master", "model"])
def test_parameters_are_frozen_and_thawed_through_either(driver: str) -> None:
    own, plain = model(), by_hand(0)
    with compiled(own, "cpu:1") as pipe:
        frozen = dict(pipe.named_parameters())["1.weight"] if driver == "master" else own[1].weight
        steps = optimizer(pipe.parameters())
        for step in range(4):
            frozen.requires_grad_(step % 2 == 0)
            pipe.step(batch(step))
            assert (own[1].weight.requires_grad, dict(pipe.named_parameters())["1.weight"].requires_grad) == (
                (step % 2 == 0,) * 2
            )
            plain.gradients(step)
            plain.masters["1.weight"].grad = plain.masters["1.weight"].grad if step % 2 == 0 else None
            steps.step()
            steps.zero_grad()
            plain.update()
        assert differing(pipe, plain) == []


@pytest.mark.slow
def test_what_was_frozen_has_no_master_and_is_not_trained_later() -> None:
    own = model()
    own[1].weight.requires_grad_(False)
    with compiled(own, "cpu:1") as pipe:
        dtypes = {name: p.dtype for name, p in pipe.named_parameters()}
        assert dtypes.pop("1.weight") == torch.bfloat16 and set(dtypes.values()) == {torch.float32}
        pipe.step(batch())
        own[1].weight.requires_grad_(True)
        with pytest.raises(RefusedError, match=r"1\.weight is trained now, and was frozen"):
            pipe.step(batch())


@pytest.mark.slow
def test_steps_add_up_and_one_that_is_not_finite_adds_nothing() -> None:
    plain = by_hand(0)
    own = model()
    own[1].weight.grad = torch.ones_like(own[1].weight)  # from before
    with compiled(own, "cpu:1", non_finite="skip") as pipe:
        assert own[1].weight.grad is None
        plain.masters["1.weight"].grad = torch.ones(16, 16)
        for step in range(3):
            pipe.step(batch(step))
            plain.gradients(step)
        with torch.no_grad():
            value = dict(pipe.named_parameters())["4.bias"]
            kept = value.clone()
            value[0] = float("nan")
        pipe.step(batch(3))
        assert pipe.skipped
        with torch.no_grad():
            value.copy_(kept)
        found = pipe.gradients()
        for name, master in plain.masters.items():
            assert torch.equal(found[name], master.grad), name
        norm = pipe.clip_grad_norm_(1e-3)
        expected = torch.nn.utils.clip_grad_norm_(plain.masters.values(), 1e-3)
        assert torch.allclose(norm, expected) and torch.allclose(
            dict(pipe.named_parameters())["4.bias"].grad, plain.masters["4.bias"].grad
        )


@pytest.mark.slow
def test_a_state_without_masters_is_taken_as_precisely_as_it_is() -> None:
    single = {name: torch.randn(t.shape) for name, t in model().state_dict().items()}
    with compiled(model(), "cpu:1") as pipe:
        pipe.load_state_dict(single)
        assert all(torch.equal(p, single[name]) for name, p in pipe.named_parameters())
        state = pipe.state_dict()
        assert all(torch.equal(t, single[name].bfloat16()) for name, t in state.items())
        model().load_state_dict(state)  # the plain model's
        state["1.weight"] = torch.zeros(16, 16).bfloat16()
        pipe.load_state_dict(state)  # its master there is of another value
        found = dict(pipe.named_parameters())
        assert not found["1.weight"].any() and torch.equal(found["4.weight"], single["4.weight"])


@pytest.mark.slow
def test_parameters_in_single_precision_are_their_own_masters() -> None:
    own = model().float()
    with compiled(own, "cpu:1") as pipe:
        assert all(mine is theirs for mine, theirs in zip(pipe.parameters(), own.parameters(), strict=True))
        pipe.step(batch())
        assert "autopart" in pipe.state_dict()._metadata
    other = copy.deepcopy(own)
    with pytest.raises(UsageError, match="master_weights is 'yes'"):
        autopart.compile(other, "cpu:1", loss_fn=loss_fn, master_weights="yes")

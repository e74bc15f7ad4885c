"""A sharding from outside: two linear layers in pieces on two ranks train, save and load like one process.

A newcomer touches 3 files: one of their own with what is cut and the code that computes so (`own_sharding.Mlp`), the
list `SHARDINGS`, where it enters (`session/lists.py`), and this test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.extending import own_sharding
from support.extending.own_sharding import batch, block, optimizer_of, plain
from support.workers import Workers

import autopart
from autopart.files.checkpoints.tensor_files import open_tensors

PIECES = {"first.weight": (4, 6), "first.bias": (4,), "second.weight": (6, 4)}


def require_equal(found: list[Any], expected: list[Any]) -> None:
    for (loss, norm, gradients), (other, other_norm, reference) in zip(found, expected, strict=True):
        assert (loss, norm) == pytest.approx((other, other_norm), rel=1e-12)
        assert gradients.keys() == reference.keys()
        for name, tensor in reference.items():
            torch.testing.assert_close(gradients[name], tensor, rtol=1e-10, atol=1e-14)


def require_state(found: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-10, atol=1e-12)


def test_pieces_train_and_are_saved_like_one_process(pair: Workers, tmp_path: Path) -> None:
    model = block()
    optimizer = optimizer_of(model.parameters())
    expected = plain((1, 2), model, optimizer)
    results = pair.run(own_sharding.trained, str(tmp_path), (1, 2), False)
    for result in results:
        assert {name: result["own"][name] for name in PIECES} == PIECES
        assert result["own"]["norm.weight"] == (6,)
        require_equal(result["steps"], expected)
        require_state(result["state"], model)

    stored = open_tensors(results[0]["path"])
    assert {name: tensor.shape for name, tensor in stored.by_name.items()} == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    for name, tensor in results[0]["state"].items():
        assert torch.equal(stored.read(name), tensor)

    loaded = block()
    again = optimizer_of(loaded.parameters())
    autopart.load_into(loaded, results[0]["path"], again)
    require_state(results[0]["state"], loaded)
    require_equal(plain((3,), loaded, again), plain((3,), model, optimizer))


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_a_checkpoint_is_loaded_into_pieces_and_from_pieces(
    pair: Workers, tmp_path: Path, first: bool, then: bool
) -> None:
    model = block()
    optimizer = optimizer_of(model.parameters())
    plain((1,), model, optimizer)
    pair.run(own_sharding.trained, str(tmp_path), (1,), False, first)
    expected = plain((2,), model, optimizer)
    for result in pair.run(own_sharding.trained, str(tmp_path), (2,), True, then):
        require_equal(result["steps"], expected)
        require_state(result["state"], model)
        assert (result["own"]["first.weight"] == PIECES["first.weight"]) == then


@pytest.mark.parametrize("optimized", [False, True])
def test_pieces_move_to_another_plan(optimized: bool, pair: Workers) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    model = block()
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    for before, after, loss, own in pair.run(own_sharding.adopted, optimized):
        require_state(before[0], model)
        for was, now in zip(before, after, strict=True):
            assert all(torch.equal(now[name], tensor) for name, tensor in was.items())
        assert loss == pytest.approx(model(batch(9)).item(), rel=1e-12)
        shapes |= own
    assert shapes["first.weight"] == (8, 6)


def test_verify_compares_pieces_with_one_process(pair: Workers) -> None:
    assert pair.run(own_sharding.verified) == [True, True]


def test_what_would_compute_with_a_piece_alone_is_refused(pair: Workers) -> None:
    with pytest.raises(autopart.RefusedError, match=r"first\.weight is held in pieces, and would be used by"):
        pair.run(own_sharding.evaluated)

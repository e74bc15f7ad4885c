"""Sequences padded to a few lengths: which keys, with what, and the proof that the loss stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.padded_models import (
    Causal,
    EveryToken,
    Masked,
    TwoSided,
    causal,
    normed,
    pooled,
    tokens,
    unmasked,
)
from torch import nn

from autopart.capture.batch.batch import Batch, BatchReader
from autopart.capture.batch.padding import Padding
from autopart.capture.derive import same_loss
from autopart.capture.derive.same_loss import require_same_loss
from autopart.ir.errors import BatchError, RefusedError

LENGTHS = (8, 16)


def padded(model: nn.Module, batch: Any, fillers: Any = None, *, lengths: Any = LENGTHS) -> tuple[Batch, Batch]:
    """Return a batch as it was passed, and padded."""
    reader = BatchReader()
    plain = reader.read(batch)
    return plain, Padding(model, lengths, fillers or {}).padded(plain, reader, with_target=False)


def shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    pairs = zip(batch.names, batch.leaves, strict=True)
    return {name: tuple(leaf.shape) for name, leaf in pairs if isinstance(leaf, torch.Tensor)}


def leaf(batch: Batch, name: str) -> torch.Tensor:
    found = batch.leaves[batch.names.index(name)]
    assert isinstance(found, torch.Tensor)
    return found


@given(st.integers(1, 40), st.sets(st.integers(1, 40), min_size=1, max_size=4))
def test_sequences_are_padded_to_the_next_length_and_keep_their_tokens(length, lengths):
    batch = {"input_ids": tokens(length), "labels": tokens(length)}
    plain, longer = padded(Masked(), batch, lengths=tuple(lengths))
    wanted = min((n for n in lengths if n >= length), default=length)
    for name, filler in (("input_ids", 3), ("labels", -100), ("attention_mask", 0)):
        found = leaf(longer, name)
        assert found.shape == (4, wanted) and (found[:, length:] == filler).all()
        assert (found[:, :length] == (leaf(plain, name) if name in plain.names else 1)).all()


def test_padded_and_whole_batches_with_and_without_a_mask_are_of_one_kind():
    model, reader = Masked(), BatchReader()
    padding = Padding(model, LENGTHS, {})
    kinds = set()
    for length, more in ((5, {}), (8, {}), (7, {"attention_mask": torch.ones(4, 7, dtype=torch.long)})):
        batch = {"input_ids": tokens(length), **more, "labels": tokens(length)}
        found = padding.padded(reader.read(batch), reader, with_target=False)
        assert require_same_loss(model, None, reader.read(batch), found, training=True)
        kinds.add(tuple(sorted(shapes(found).items())))
    assert len(kinds) == 1


def test_a_mask_of_none_and_positional_arguments_are_understood():
    for batch in ((tokens(5), None, tokens(5)), ((tokens(5),), {"labels": tokens(5), "attention_mask": None})):
        _, longer = padded(Masked(), batch)
        assert sorted(shapes(longer).values()) == [(4, 8)] * 3


def test_the_decoder_has_lengths_of_its_own():
    _, longer = padded(TwoSided(), {"input_ids": tokens(5), "labels": tokens(11)})
    assert shapes(longer) == {"input_ids": (4, 8), "attention_mask": (4, 8), "labels": (4, 16)}
    batch = {"input_ids": tokens(5), "labels": tokens(11), "attention_mask": torch.ones(4, 5)}
    assert require_same_loss(TwoSided(), None, *padded(TwoSided(), batch), training=True)
    names = {"decoder_input_ids": tokens(11), "decoder_attention_mask": tokens(11) * 0 + 1}
    _, longer = padded(Causal(), {"input_ids": tokens(5), **names, "labels": tokens(11)})
    assert set(shapes(longer).values()) == {(4, 8), (4, 16)}


def test_what_is_no_sequence_stays():
    batch = {"input_ids": tokens(5), "labels": torch.tensor([0, 1, 0, 1]), "features": torch.randn(4, 7), "scale": 2.0}
    plain, longer = padded(Causal(), batch)
    assert leaf(longer, "features") is leaf(plain, "features") and leaf(longer, "labels") is leaf(plain, "labels")
    _, longer = padded(Causal(), {"input_ids": tokens(5), "labels": tokens(3)})
    assert shapes(longer)["labels"] == (4, 3)  # of classes
    _, longer = padded(Causal(), {"input_ids": tokens(5), "position_ids": torch.arange(5)})
    assert shapes(longer)["position_ids"] == (8,)


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("weights", torch.rand(4, 5)),
        ("boxes", torch.rand(4, 5, 4)),
        ("attention_mask", torch.zeros(4, 1, 5, 5)),
        ("labels", torch.rand(4, 5)),
        ("cache_position", torch.arange(5)),
        ("token_type_ids", tokens(6)),
    ],
)
def test_a_key_that_is_not_recognised_is_refused_by_name(key, tensor):
    with pytest.raises(BatchError, match=rf"cannot pad {key}(.|\n)*pad_with=\{{'{key}': 0\}}"):
        padded(Causal(), {"input_ids": tokens(5), key: tensor})


def test_pad_with_pads_every_axis_of_tokens_or_leaves_a_key_as_it_is():
    batch = {"input_ids": tokens(5), "bias": torch.zeros(4, 1, 5, 5), "boxes": torch.rand(4, 5, 4)}
    _, longer = padded(Causal(), batch, {"bias": -1e9, "boxes": 0.5})
    assert shapes(longer) == {"input_ids": (4, 8), "bias": (4, 1, 8, 8), "boxes": (4, 8, 4)}
    assert (leaf(longer, "bias")[..., 5:] == -1e9).all() and (leaf(longer, "boxes")[:, 5:] == 0.5).all()
    plain, longer = padded(Causal(), batch, {"bias": None, "boxes": None})
    assert leaf(longer, "bias") is leaf(plain, "bias")
    _, longer = padded(Causal(), {"x": tokens(5)}, {"x": 7})
    assert (leaf(longer, "x")[:, 5:] == 7).all()


def test_an_axis_that_once_had_another_size_is_no_axis_of_tokens():
    padding, reader = Padding(Causal(), LENGTHS, {}), BatchReader()
    for length in (5, 7):
        batch = reader.read({"input_ids": tokens(length), "features": torch.rand(4, 7)})
        found = padding.padded(batch, reader, with_target=False)
        assert shapes(found) == {"input_ids": (4, 8), "features": (4, 7)}


def test_a_batch_without_known_sequences_is_refused():
    with pytest.raises(BatchError, match=r"finds no sequences among x(.|\n)*pad_with=\{'x': 0\}"):
        padded(Causal(), {"x": torch.rand(4, 5)})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_causal_model_and_a_masked_one_have_the_same_loss(dropout):
    model = Causal(causal, dropout)
    assert require_same_loss(model, None, *padded(model, {"idx": tokens(5), "targets": tokens(5)}), training=True)
    state = torch.random.get_rng_state()
    masked = Masked()
    assert not torch.equal(state, torch.random.get_rng_state())
    state = torch.random.get_rng_state()
    for training in (True, False):
        assert require_same_loss(
            masked, None, *padded(masked, {"input_ids": tokens(5), "labels": tokens(5)}), training=training
        )
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("model", [Causal(unmasked), Causal(pooled), Causal(normed), EveryToken()], ids=lambda m: "")
@pytest.mark.parametrize("length", [5, 7])
def test_a_model_that_reads_the_padding_is_refused(model, length):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RefusedError, match="padding changes the loss of this model"):
        require_same_loss(
            model, None, *padded(model, {"idx": tokens(length), "targets": tokens(length)}), training=True
        )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_label_that_the_loss_does_not_know_is_refused_with_the_reason():
    model = Causal()
    model.forward = lambda idx, targets: nn.functional.nll_loss(model.head(model.words(idx))[..., 0].log_softmax(-1),
                                                                targets[:, -1])  # fmt: skip
    with pytest.raises(RefusedError, match="does not run on the padded batch: IndexError: Target"):
        require_same_loss(
            model, None, *padded(model, {"idx": tokens(7), "targets": tokens(7) % 7}, {"targets": 99}), training=True
        )


def test_gradients_are_compared_too():
    class Detached(Causal):
        """Has a loss that does not depend on the padding, and a gradient that does."""

        def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            extra = self.head(self.words(idx)).mean()
            return super().forward(idx, targets) + extra - extra.detach()

    model = Detached()
    with pytest.raises(RefusedError, match=r"the gradient of \w+.\w+ differs with padding"):
        require_same_loss(model, None, *padded(model, {"idx": tokens(5), "targets": tokens(5)}), training=True)


def test_memory_decides_what_is_compared(monkeypatch, caplog):
    model = Causal()
    batches = padded(model, {"idx": tokens(5), "targets": tokens(5)})
    numbers = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    ways = []
    plain = same_loss._compare
    monkeypatch.setattr(same_loss, "_compare", lambda a, b, way, *more: (ways.append(way), plain(a, b, way, *more)))
    for free in (1e12, 2 * 12 * numbers, 2 * 4 * numbers):
        monkeypatch.setattr(same_loss, "_free_bytes", lambda device, free=free: free)
        assert require_same_loss(model, None, *batches, training=True)
    assert [(way.dtype, way.gradients) for way in ways] == [
        (torch.float64, True), (torch.float32, True), (torch.float32, False),
    ]  # fmt: skip
    assert "only the losses of padded batches are compared" in caplog.text
    monkeypatch.setattr(same_loss, "_free_bytes", lambda device: 2 * 4 * numbers - 1)
    with pytest.raises(RefusedError, match="cannot be proved"):
        require_same_loss(model, None, *batches, training=True)
    with pytest.raises(RefusedError, match="meta device"):
        require_same_loss(model.to("meta"), None, *batches, training=True)


def test_a_loss_that_is_not_finite_proves_nothing():
    model = Causal()
    batches = padded(model, {"idx": tokens(5), "targets": torch.full((4, 5), -100)})
    assert not require_same_loss(model, None, *batches, training=True)

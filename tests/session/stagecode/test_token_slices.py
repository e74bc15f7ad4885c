"""Slices of tokens, forward in order and backward from the last, give the loss and gradients of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from support.models.tokens.causal_zoo import CAUSAL
from support.models.tokens.token_models import SEQ, VOCAB, MaskBuffer, Model, token_batch, tril_softmax
from support.models.zoo import CASES
from support.oracles.sliced import CPU, analysed, future_shows, inputs_of, run_sliced, unsliced, worst_error
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, capture
from autopart.ir.errors import RefusedError, UsageError
from autopart.ir.graph import Size
from autopart.ir.plan import Stage
from autopart.passes.tokens.recipe import Recipe
from autopart.planning.derive.token_axis import token_recipe
from autopart.runtime.tensors import LocalTensors
from autopart.stagecode.slicing import SliceChecks
from autopart.stagecode.split import casts_of
from autopart.stagecode.token_slices import slice_stage

LENGTHS = (7, 5, 3, 1)


def check_equal(
    name: str, attention: str | None, *, padded: bool, stages: int, tolerance: float, dtype: torch.dtype = torch.float64
) -> None:
    model = (CASES | CAUSAL)[name].model(dtype=dtype)
    if attention is not None:
        model.set_attn_implementation(attention)
    batch = (CASES | CAUSAL)[name].data(2, dtype)
    if not padded:
        del batch["attention_mask"]
    found = analysed(model, batch)
    count, inputs = len(found.captured.graph.ops), inputs_of(found)
    loss, gradients = run_sliced(found, inputs, LENGTHS, [count * i // stages for i in range(1, stages)])
    expected_loss, expected = unsliced(found, inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)  # transformers takes it in fp32
    assert worst_error(gradients, expected) <= tolerance
    for token in (1, 6, 15):
        assert not future_shows(found, inputs, token, tolerance)


@pytest.mark.slow
def test_slices_of_llama_on_two_stages_with_padding():
    check_equal("llama", None, padded=True, stages=2, tolerance=1e-10)


def test_slices_of_gpt2_with_attention_written_out():
    check_equal("gpt2", "eager", padded=False, stages=1, tolerance=1e-10)


def test_lengths_that_do_not_make_up_the_sequence_are_refused():
    found = analysed(Model(tril_softmax), token_batch())
    assert isinstance(found.recipe, Recipe) and found.recipe.tokens == SEQ
    with pytest.raises(UsageError, match="7, 4 tokens do not make up a sequence of 12"):
        run_sliced(found, inputs_of(found), (7, 4))


class _Features(torch.nn.Module):
    """Reads vectors of as many numbers as there are tokens."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(SEQ, VOCAB)

    def forward(self, vectors, labels):
        return F.cross_entropy(self.layer(vectors).flatten(0, 1), labels.flatten())


def test_vectors_with_as_many_features_as_tokens_are_cut_along_the_tokens_alone():
    batch = {"vectors": torch.randn(2, SEQ, SEQ), "labels": token_batch()["labels"]}
    found = analysed(_Features().double(), {**batch, "vectors": batch["vectors"].double()})
    inputs = inputs_of(found)
    expected_loss, expected = unsliced(found, inputs)
    loss, gradients = run_sliced(found, inputs, (7, 5))
    torch.testing.assert_close(loss, expected_loss)
    assert worst_error(gradients, expected) <= 1e-10


def test_casts_of_parameters_are_given_to_every_slice_and_received_from_no_stage():
    captures, batch = CaptureCache(Model(tril_softmax)), flatten(token_batch())
    captures.run_in("bf16", "cpu")
    recipe, captured = token_recipe(captures, batch, Size(2)), captures(batch, Size(2))
    assert isinstance(recipe, Recipe)
    ops = {op.name for op in captured.graph.ops}
    casts = casts_of(captured.graph, ops, captured.graph.outputs)
    _, slices = slice_stage(captured, recipe, Stage(tuple(ops), (0,)), captured.graph.outputs, (9, 3), CPU)
    assert casts
    received = set(captured.graph.value_map()) - set(captured.graph.inputs) - recipe.prologue
    for code in slices:
        assert not received & set(code.inputs) and set(code.casts.values()) == set(casts.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention", "padded", "tolerance"), [
    ("llama", "eager", True, 1e-6), ("llama_tied", None, True, 1e-10), ("mistral", None, True, 1e-10),
    ("mistral", "eager", False, 1e-6), ("qwen3", None, True, 1e-10), ("gpt2", None, True, 1e-10),
    ("gpt2", "eager", True, 1e-10), ("gpt_neox", None, True, 1e-10), ("gemma2", None, True, 1e-6),
    ("opt", None, True, 1e-10), ("phi", None, True, 1e-10), ("falcon", None, True, 1e-10),
    ("olmo2", None, True, 1e-10), ("bloom", None, True, 1e-6), ("gptj", None, True, 1e-6),
    ("gpt_neo", None, True, 1e-6),
])  # fmt: skip
def test_slices_of_causal_language_models(name, attention, padded, tolerance):
    for stages in (1, 2):
        check_equal(name, attention, padded=padded, stages=stages, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_slices_of_experts(name):
    """In single precision, for grouped products have no other."""
    for stages in (1, 2):
        check_equal(name, None, padded=True, stages=stages, tolerance=1e-5, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "op"), [("bert", "scaled_dot_product_attention"), ("t5", "scaled_dot_product")])
def test_models_that_see_the_future_are_refused(name, op):
    refusal = analysed(CASES[name].model(), CASES[name].data(2)).recipe
    assert isinstance(refusal, RefusedError)
    assert refusal.what.startswith(op) and "encoder" in refusal.where


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_models_without_sequences_are_refused(name):
    refusal = analysed(CASES[name].model(), CASES[name].data(2)).recipe
    assert isinstance(refusal, RefusedError) and "no sequences" in refusal.what


@pytest.mark.slow
def test_a_loss_of_the_router_over_all_tokens_is_refused():
    model = CASES["mixtral"].model()
    model.config.output_router_logits = True
    refusal = analysed(model, CASES["mixtral"].data(2)).recipe
    assert isinstance(refusal, RefusedError) and "slice by slice" in refusal.what


def test_a_mask_buffer_of_just_the_sequence_length_is_sliced_exactly():
    found = analysed(MaskBuffer(SEQ).double(), token_batch())
    inputs = inputs_of(found)
    expected_loss, expected = unsliced(found, inputs)
    loss, gradients = run_sliced(found, inputs, (7, 4, 1))
    torch.testing.assert_close(loss, expected_loss)
    assert worst_error(gradients, expected) <= 1e-10


@pytest.mark.parametrize("kind", ["written", "loaded", "plain"])
def test_a_mask_that_was_changed_after_it_was_proven_causal_is_refused(kind):
    model, batch = MaskBuffer(2 * SEQ), token_batch()
    if kind == "plain":  # an attribute that is no buffer
        seen = model.seen
        del model.seen
        model.seen = seen
    with autopart.compile(model, "cpu:1", sample=batch, token_slices=2, costs="analytic", cache=False) as pipe:
        pipe.step(batch)
        changed = model.seen.clone()
        changed[..., :2] = 1.0
        if kind == "loaded":
            pipe.load_state_dict({**pipe.state_dict(), "seen": changed})
        else:
            model.seen.copy_(changed)
        with pytest.raises(autopart.RefusedError, match="tensor was changed on which the proof rests"):
            pipe.step(batch)


def test_a_constant_that_was_copied_to_another_device_is_not_written_to_unnoticed():
    class Weighed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.factor = torch.nn.Linear(4, 4), torch.ones(4)

        def forward(self, x):
            return (self.linear(x) * self.factor).mean()

    model = Weighed()
    captured = capture(model, flatten(torch.randn(2, 4)))
    for device, copied in (("meta", True), ("cpu", False)):
        checks = SliceChecks(LocalTensors(torch.device(device)), torch.device(device))
        checks.note_copies(captured)
        checks.check_constants()
        model.factor.mul_(2)
        if copied:
            with pytest.raises(RefusedError, match="written to in place"):
                checks.check_constants()
        else:
            checks.check_constants()

"""Token slices: what is refused, and what a stage keeps.  `test_any_plan` compares slices with whole sequences."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from support.jobs.step_jobs import EVERY, compiled, expected_of, fresh
from support.models.tokens.causal_zoo import REFUSED
from support.models.zoo import CASES
from support.oracles.one_process import Difference, Expected, difference, plain_step
from support.workers import Workers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import autopart
from autopart.ir.errors import AutopartError, RefusedError, UsageError

Lengths = tuple[int, ...]
OF_16 = (7, 5, 3, 1)


@pytest.mark.slow
def test_models_and_lengths_that_cannot_be_sliced_are_refused() -> None:
    case = CASES["bert"]
    with pytest.raises(RefusedError):
        autopart.plan(case.model(), "cpu:2", sample=case.data(2), token_slices=2, costs="analytic")
    plan = autopart.plan(case.model(), "cpu:2", sample=case.data(2), token_slices="auto", costs="analytic")
    assert plan.decision.token_slices == () and any("sequences are whole" in note for note in plan.notes)
    with pytest.raises(UsageError, match="does not make up sequences of 16 tokens"):
        autopart.plan(CASES["gpt2"].model(), "cpu:2", sample=CASES["gpt2"].data(2), token_slices=(8, 4))
    with pytest.raises(UsageError, match="token_slices is 'many'"):
        autopart.plan(CASES["gpt2"].model(), "cpu:2", sample=CASES["gpt2"].data(2), token_slices="many")


def shorter_sequences(name: str, lengths: Lengths, tokens: int) -> tuple[str, str, Difference | None]:
    """Take a step with shorter sequences than the compiled ones.

    Return the text and the type of its error, and the difference of a following step with the compiled length.
    """
    case = EVERY[name]
    batch = case.data(4, torch.float64)
    message, kind = "", ""
    with compiled(case, fresh(name, torch.float64), batch, token_slices=lengths, stages=2, micro_batches=2) as pipe:
        pipe.step(batch)
        try:
            pipe.step({key: value[:, :tokens].clone() for key, value in batch.items()})
        except AutopartError as error:
            message, kind = str(error), type(error).__name__
        for parameter in pipe.parameters():
            parameter.grad = None
        loss = pipe.step(batch).item()
        found, state = pipe.gradients(), pipe.state_dict()
        off = difference(loss, found, state, expected_of(name, torch.float64, 4, 1), torch.float64)
        return message, kind, off if pipe.rank == 0 else None


@pytest.mark.slow
def test_sequences_of_another_length_are_refused_and_the_next_step_is_exact(pair: Workers) -> None:
    results = pair.run(shorter_sequences, "llama", OF_16, 12)
    for message, kind, _ in results:
        assert kind == "UsageError" and "slices of 7, 5, 3, 1 tokens do not make up a sequence of 12" in message
    assert results[0][2].within(), results[0][2]


WHY = {
    "bert": "scaled_dot_product_attention", "t5": "scaled_dot_product_attention", "vit": "no sequences",
    "router_loss": "slice by slice", "pooled": "mean", "norm_of_tokens": "statistics over all tokens",
    "flipped": "flip", "one_cell": "not proven to hide", "prefix_mask": "not proven to hide",
}  # fmt: skip


def trained_whole(name: str, dtype_name: str) -> dict[str, Any]:
    """Train a model whose sequences cannot be cut.

    Return the error when slices are requested, and the planner's notes and the difference of a step with slices "auto".
    """
    dtype, case = getattr(torch, dtype_name), EVERY[name]
    batch, message = case.data(4, dtype), ""
    options: dict[str, Any] = {
        "stages": 2,
        "micro_batches": 1,
    }  # batch statistics and router losses need all rows at once
    try:
        compiled(case, fresh(name, dtype), batch, token_slices=2, **options)
    except RefusedError as refusal:
        message = str(refusal)
    with compiled(case, fresh(name, dtype), batch, token_slices="auto", **options) as pipe:
        slices, notes = pipe.plan.decision.token_slices, pipe.plan.notes
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    reference = case.model(dtype=dtype)
    expected = Expected.of(plain_step(case, reference, batch, 1), reference)
    off = difference(loss, found, state, expected, dtype) if leads else None
    return {"message": message, "slices": slices, "notes": notes, "off": off}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_sliced_are_refused_with_the_reason_and_train_whole(pair: Workers, name: str) -> None:
    results = pair.run(trained_whole, name, "float32" if name == "router_loss" else "float64")
    for result in results:
        assert WHY[name] in result["message"] and "leave token_slices out" in result["message"]
        assert result["slices"] == () and any("sequences are whole" in note for note in result["notes"])
    off = results[0]["off"]
    assert off.gradient <= (1e-5 if name == "router_loss" else 1e-10) and abs(off.loss) <= 1e-6, off


class _Live:
    """Bytes of distinct memory that autograd keeps for the backward pass. own: addresses that do not count."""

    def __init__(self, own: set[int]) -> None:
        self._own, self._users, self._sizes = own, Counter[int](), dict[int, int]()
        self.now = self.most = 0

    def keep(self, tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._own:
            self._users[address] += 1
            if self._users[address] == 1:
                self._sizes[address] = size
                self.now += size
                self.most = max(self.most, self.now)
            weakref.finalize(kept, self._drop, address)
        return kept

    def _drop(self, address: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            self.now -= self._sizes.pop(address)


class _Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept(name: str, lengths: Lengths, micros: int) -> dict[str, int]:
    """Return the most bytes that this rank's stage keeps for the backward pass, over two stages with one-row
    micro-batches.

    The keys are "one" whole sequence, "whole" sequences, "slices", and "keys_and_values" for K and V of one sequence.
    """
    case, found = EVERY[name], {}
    for key, count, slices in (("one", 1, None), ("whole", micros, None), ("slices", micros, lengths)):
        options: dict[str, Any] = {"cuts": ["model.layers.1"], "micro_batches": count, "schedule": "1f1b"}
        batch = case.data(count)
        with compiled(case, fresh(name), batch, token_slices=slices, **options) as pipe:
            parameters = dict(pipe.named_parameters())
            own = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
            live = _Live(own | {value.untyped_storage().data_ptr() for value in pipe.session.tensors.held.values()})
            pipe.step(batch)
            with saved_tensors_hooks(live.keep, lambda kept: kept.tensor):
                pipe.step(batch)
            assert not live.now
            found[key] = live.most
        heads: list[nn.Parameter] = [p for n, p in parameters.items() if "k_proj" in n or "v_proj" in n]
        found["keys_and_values"] = sum(p.shape[0] for p in heads) * batch["input_ids"].shape[1] * 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, 4, 8])
def test_1f1b_over_slices_keeps_little_more_than_one_sequence(pair: Workers, slices: int) -> None:
    """The first stage keeps (slices + stages - 1) / slices sequences, where whole sequences would be `stages`.

    In addition it keeps K and V of one sequence, because those of the next sequence are allocated with its first slice.
    Attention reads two heads of each.  All layers and sequences share the masks of the slices behind the first, which
    whole sequences do without.
    """
    long = 128 // slices
    found = pair.run(kept, "llama_long", (long,) * slices, 4)[0]
    masks = sum(4 * long * end for end in range(2 * long, 128 + 1, long))
    assert found["whole"] == pytest.approx(2 * found["one"], rel=0.02)
    assert found["slices"] <= (slices + 1) / slices * found["one"] + 2 * found["keys_and_values"] + masks, found

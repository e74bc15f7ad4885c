"""Steps with token slices on every rank of a worker pool, each compared with one process."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autopart.ir.errors import AutopartError, RefusedError
from support.jobs.step_jobs import EVERY, compiled, expected_of, fresh
from support.oracles.one_process import Difference, Expected, difference, gradient_error, plain_loss, plain_step

Lengths = tuple[int, ...]


def sliced(
    name: str,
    lengths: Lengths,
    stages: int,
    schedule: str,
    micros: int,
    rows: int,
    dtype_name: str = "float64",
    without: tuple[str, ...] = (),
    replicas: Any = 1,
    evaluate: bool = True,
) -> tuple[float, Difference | None, str]:
    """Take one training step in token slices.

    without: batch keys to leave out; evaluate: also check the evaluation loss, which uses whole sequences. Every rank
    returns its loss and its program, rank 0 also the difference from one process.
    """
    dtype, case = getattr(torch, dtype_name), EVERY[name]
    batch = {key: value for key, value in case.data(rows, dtype).items() if key not in without}
    options: dict[str, Any] = {"stages": stages, "schedule": schedule, "micro_batches": micros, "replicas": replicas}
    with compiled(case, fresh(name, dtype), batch, token_slices=lengths, **options) as pipe:
        assert pipe.plan.decision.token_slices == lengths
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
        played = str(pipe.program)
        if evaluate:
            evaluated = pipe.eval_loss(batch).item()
            assert abs(evaluated - loss) <= 1e-6 * abs(loss)
    if not leads:
        return loss, None, played
    return loss, difference(loss, found, state, expected_of(name, dtype, rows, 1, without), dtype), played


def trained(name: str, lengths: Lengths, steps: int, rows: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Train with AdamW in fp64, each optimizer step after the accumulated gradients of several batches.

    Return the losses of both sides, the worst relative error of a weight at the end, and the evaluation losses.
    """
    case = EVERY[name]
    captures, reference = fresh(name, torch.float64), case.model(dtype=torch.float64)
    batches = [case.data(count, torch.float64) for count in rows]
    with compiled(case, captures, batches[0], token_slices=lengths, **options) as pipe:
        assert pipe.plan.decision.token_slices == lengths
        mine = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            for batch in batches:
                losses.append((pipe.step(batch).item(), plain_step(case, reference, batch, 1).item()))
            for optimizer in (mine, plain):
                optimizer.step()
                optimizer.zero_grad()
        state, expected = pipe.state_dict(), reference.state_dict()
        reference.eval()
        evaluated = pipe.eval_loss(batches[-1]).item(), plain_loss(case, reference, batches[-1]).item()
    assert state.keys() == expected.keys()
    weights, worst = gradient_error(dict(state), expected, torch.float64)
    return {"losses": losses, "weights": weights, "worst": worst, "evaluated": evaluated}


def half_precision(name: str, lengths: Lengths, precision: str, steps: int) -> tuple[list[float], list[float]]:
    """Return the losses of a pipe in token slices and of the same pipe on whole sequences."""
    case, curves = EVERY[name], []
    batches = [case.data(4), case.data(6)]
    for slices in (lengths, None):
        options: dict[str, Any] = {"stages": 2, "micro_batches": 2, "precision": precision, "token_slices": slices}
        with compiled(case, case.model(), batches[0], **options) as pipe:
            assert pipe.plan.decision.token_slices == (slices or ())
            optimizer, losses = torch.optim.AdamW(pipe.parameters(), lr=1e-2), []
            for step in range(steps):
                losses.append(pipe.step(batches[step % 2]).item())
                if not pipe.skipped:
                    optimizer.step()
                optimizer.zero_grad()
            curves.append(losses)
    return curves[0], curves[1]


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

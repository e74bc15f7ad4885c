"""Steps over slices of sequences, on every rank of a worker pool, each held against one process."""

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
    """One training step in slices.  without: keys of the batch to leave out.  evaluate: whether to look at the loss of
    whole sequences too.  Every rank returns its loss and what it played, rank 0 how far off the step was."""
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
    """AdamW in fp64, each of its steps after gradients of several batches, of so many rows, were added up.

    Losses of both, the worst relative error of a weight at the end, of a buffer, and the losses in evaluation.
    """
    case = EVERY[name]
    captures, reference = fresh(name, torch.float64), case.model(dtype=torch.float64)
    batches = [case.data(count, torch.float64) for count in rows]
    with compiled(case, captures, batches[0], token_slices=lengths, **options) as pipe:
        assert pipe.plan.decision.token_slices == lengths
        mine = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            for batch in batches:
                losses.append((pipe.step(batch).item(), plain_step(case, reference, batch, 1).item()))
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        state, expected = pipe.state_dict(), reference.state_dict()
        reference.eval()
        evaluated = pipe.eval_loss(batches[-1]).item(), plain_loss(case, reference, batches[-1]).item()
    assert state.keys() == expected.keys()
    weights, worst = gradient_error(dict(state), expected, torch.float64)
    return {"losses": losses, "weights": weights, "worst": worst, "evaluated": evaluated}


def in_half(name: str, lengths: Lengths, precision: str, steps: int) -> tuple[list[float], list[float]]:
    """Losses of a pipe in slices, and of the same pipe on whole sequences."""
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


def cut_short(name: str, lengths: Lengths, tokens: int) -> tuple[str, str, Difference | None]:
    """A batch of shorter sequences than those that were compiled for: the error of a step, in words, and of what kind;
    how far off a step with batches of the first length is afterwards."""
    case = EVERY[name]
    batch = case.data(4, torch.float64)
    told, kind = "", ""
    with compiled(case, fresh(name, torch.float64), batch, token_slices=lengths, stages=2, micro_batches=2) as pipe:
        pipe.step(batch)
        try:
            pipe.step({key: value[:, :tokens].clone() for key, value in batch.items()})
        except AutopartError as error:
            told, kind = str(error), type(error).__name__
        for parameter in pipe.parameters():
            parameter.grad = None
        loss = pipe.step(batch).item()
        found, state = pipe.gradients(), pipe.state_dict()
        off = difference(loss, found, state, expected_of(name, torch.float64, 4, 1), torch.float64)
        return told, kind, off if pipe.rank == 0 else None


def trained_whole(name: str, dtype_name: str) -> dict[str, Any]:
    """A model that cannot be cut: what is said where slices are asked for; what the planner notes where they are left
    to it, and how far off a step is then."""
    dtype, case = getattr(torch, dtype_name), EVERY[name]
    batch, told = case.data(4, dtype), ""
    options: dict[str, Any] = {"stages": 2, "micro_batches": 1}  # statistics, and losses of the router, are of all rows
    try:
        compiled(case, fresh(name, dtype), batch, token_slices=2, **options)
    except RefusedError as refusal:
        told = str(refusal)
    with compiled(case, fresh(name, dtype), batch, token_slices="auto", **options) as pipe:
        slices, notes = pipe.plan.decision.token_slices, pipe.plan.notes
        loss = pipe.step(batch).item()
        found, state, leads = pipe.gradients(), pipe.state_dict(), pipe.rank == 0
    reference = case.model(dtype=dtype)
    expected = Expected.of(plain_step(case, reference, batch, 1), reference)
    off = difference(loss, found, state, expected, dtype) if leads else None
    return {"told": told, "slices": slices, "notes": notes, "off": off}


class _Live:
    """What autograd keeps for the backward, in bytes of distinct memory.  own: addresses that do not count."""

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
    """Bytes that this rank's stage keeps at most for the backward, over two stages with one row in each micro-batch:
    of one whole sequence, of whole sequences, and in slices; and those of K and V of one sequence."""
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

"""Any setup beside its model in one process, which knows nothing of plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopart.batch.batch import split_rows
from autopart.ir.shares import Piece, whole
from autopart.runtime.tensors import common
from autopart.session.step.parts import micro_cut
from support.jobs.any_plan import Refused, Trained, batches_of, case_of, model_of, play, state_of, train
from support.languages.setups import DRAWING, Setup, smallest
from support.oracles.one_process import gradients_of, plain_loss, plain_step, rows_of
from support.workers import Workers

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "half": 3e-2}
"""Of a gradient of the first step, relative to its norm."""
LATER = {"float64": 30.0, "float32": 100.0, "half": 2.0}
"""What rounding grows by where weights have been updated; changes of weights are also rounded to the weights."""
LEAST = {"float64": 1e-4, "float32": 1e-2, "half": 0.1}
"""The part of the norm of all tensors together below which one is zero but for rounding."""
REFUSALS = (
    "cannot share batch statistics: its replicas take turns",
    "divided between replicas",
    "replicas need a row of every micro-batch each",
    "nothing to train",
    "Expected more than 1 value per channel when training",
    "ops cannot be cut into",
    "blocks that can stand apart",
    "does not go with replicas that take micro-batches in turn",
    "leave token_slices out: the model is then trained on whole sequences",
    "tensor_parallel does not run with",
    "nothing in the model can be divided among",
    "equal parts: it sums over",
    "tokens cannot be divided among",
    "attention with dropout cannot be divided by heads",
)
"""Reasons for which a drawn setup may be refused; any other is a failure."""


@dataclass(frozen=True)
class Outcome:
    """What became of a setup: "equal", "refused" or "wrong", and why."""

    kind: str
    text: str = ""

    @property
    def way(self) -> str:
        """The error, or that values differ: setups that fail in another way are no simpler ones."""
        name = self.text.partition(":")[0]
        return name if name.isidentifier() else self.kind


def outcome(setup: Setup, pool: Workers) -> Outcome:
    """Train a setup on the ranks of a pool and in one process."""
    try:
        found = pool.run(play, setup)
    except Exception as error:
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    return judged(setup, found)


def judged(setup: Setup, found: list[Trained | Refused]) -> Outcome:
    """Compare what the ranks returned with one process."""
    refused = [each for each in found if isinstance(each, Refused)]
    if refused:
        text = f"{refused[0].kind}: {refused[0].text}"
        alike = len(refused) == len(found) and len({each.kind for each in refused}) == 1
        known = "fix:" in text and any(reason in text for reason in REFUSALS)
        return Outcome("refused" if alike and known else "wrong", text)
    trained = [each for each in found if isinstance(each, Trained)]
    wrong = [] if any(each.values for each in trained) else ["no rank updates a parameter"]
    wrong += differences(setup, trained, alone(setup))
    return Outcome("wrong" if wrong else "equal", "\n".join(wrong[:12]))


# -- one process -----------------------------------------------------------------------------------------------------


def alone(setup: Setup) -> Trained:
    """Train the model in one process: plain torch, or for one that draws numbers a pipe of one stage on one rank."""
    if setup.model in DRAWING:
        one = Setup(setup.model, setup.rows, 1, micros=setup.micros, dtype=setup.dtype, precision=setup.precision)
        found = play(replace(one, frozen=setup.frozen, optimizer=setup.optimizer, evaluated=setup.evaluated))
        assert isinstance(found, Trained), found
        return found
    model, case = model_of(setup), case_of(setup.model)
    names = dict(model.named_parameters())
    masters = {n: p.detach().float().requires_grad_() for n, p in names.items()} if setup.masters else names

    def step(batch: Any) -> float:
        if setup.masters:
            _round(names, masters)
        if case.coupled:
            cut = micro_cut(rows_of(batch), split_rows(setup.rows[0], setup.micros))
            return plain_step(case, model, batch, len(cut)).item()
        with _autocast(setup):
            loss = plain_loss(case, model, batch)
        if loss.requires_grad:
            loss.backward()
        return loss.item()

    def gradients() -> Any:
        found = gradients_of(model)
        if setup.masters:
            for name, gradient in found.items():
                masters[name].grad = None if gradient is None else gradient.float()
            model.zero_grad()
        return found

    losses, kept, optimizer = train(setup, step, gradients, lambda: masters.items())
    _round(names, masters)
    held = {name: parameter.detach().clone() for name, parameter in masters.items()}
    states = {name: state_of(optimizer, parameter) for name, parameter in masters.items()}
    model.eval()
    with torch.no_grad(), _autocast(setup):
        evaluated = plain_loss(case, model, batches_of(setup)[0]).item() if setup.evaluated else 0.0
    return Trained(losses, kept, {k: v.clone() for k, v in model.state_dict().items()}, held, states, evaluated)


def _autocast(setup: Setup) -> Any:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setup.precision)
    return torch.autocast("cpu", half, cache_enabled=False) if half else nullcontext()


def _round(names: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(masters[name])


# -- differences -----------------------------------------------------------------------------------------------------

Values = Mapping[str, torch.Tensor | None]


def differences(setup: Setup, found: Sequence[Trained], expected: Trained) -> Iterator[str]:
    """Yield what differs by more than rounding: of losses on all ranks, of the whole model on the first, of parameters
    and the optimizer's state on the ranks that update them."""
    kind = "half" if setup.half else setup.dtype
    least, limits = LEAST[kind], (TOLERANCE[kind], TOLERANCE[kind] * LATER[kind])
    for rank, each in enumerate(found):
        pairs = zip((*each.losses, each.evaluated), (*expected.losses, expected.evaluated), strict=True)
        for place, (mine, loss) in enumerate(pairs):
            both = math.isnan(mine) and math.isnan(loss)  # a batch of which nothing counts
            if not (both or abs(mine - loss) <= limits[place > 0] * (abs(loss) or 1.0)):
                yield f"loss {place} on rank {rank} is {mine}, not {loss}"
    for place, (ours, theirs) in enumerate(zip(found[0].gradients, expected.gradients, strict=True)):
        yield from _apart(f"gradient {place}", ours, theirs, limits[place], least)
    before = {name: value.detach() for name, value in model_of(setup).state_dict().items()}
    if setup.masters:
        yield from _not_rounded(found)
    else:
        yield from _apart(
            "change", _changes(found[0].state, before), _changes(expected.state, before), limits[1], least
        )
    learning = {name for name, parameter in model_of(setup).named_parameters() if parameter.requires_grad}
    yield from (
        f"no rank updates {name}" for name in sorted(learning - {name for each in found for name in each.values})
    )
    copies: dict[tuple[str, Piece | None], torch.Tensor] = {}
    for rank, each in enumerate(found):
        for name, value in each.values.items():
            if not torch.equal(copies.setdefault((name, each.pieces.get(name)), value), value):
                yield f"{name} on rank {rank} is not the same, bit by bit, as on another rank"
        first, wanted = (_parts(each, {name: of[name] for name in each.values}) for of in (before, expected.values))
        here = f"on rank {rank}"
        yield from _apart(f"value {here}", _changes(each.values, first), _changes(wanted, first), limits[1], least)
        for key in sorted({key for state in expected.optimizer.values() for key in state}):
            kept, wanted = (
                {name: of.optimizer[name].get(key) for name in each.values if name in of.optimizer}
                for of in (each, expected)
            )
            yield from _apart(f"{key} {here}", kept, _parts(each, wanted), limits[1], least)


def _parts(own: Trained, tensors: Values) -> Values:
    """Return what a rank has of whole tensors; of state that is one number, all."""

    def part(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        piece = own.pieces.get(name)
        if tensor is None or piece is None or not tensor.dim():
            return tensor
        found = common(tensor, whole(name), piece)
        return found.flatten(piece.axis, piece.axis + 1) if piece.blocks > 1 else found

    return {name: part(name, tensor) for name, tensor in tensors.items()}


def _not_rounded(found: Sequence[Trained]) -> Iterator[str]:
    """Yield parameters of the model that are not the rounded values of their masters, bit by bit."""
    state = found[0].state
    for rank, each in enumerate(found):
        own = _parts(each, {name: state[name] for name in each.values})
        for name, master in each.values.items():
            if not torch.equal(own[name], master.to(state[name].dtype)):
                yield f"{name} is not the rounded master of rank {rank}"


def _changes(after: Values, before: Values) -> Values:
    return {
        name: None if value is None or before[name] is None else value.double() - before[name].double()
        for name, value in after.items()
    }


def _apart(what: str, found: Values, expected: Values, tolerance: float, least: float) -> Iterator[str]:
    """Yield the tensors that differ by more than a part of their norm, or of a part of the norm of all together."""
    if found.keys() != expected.keys():
        yield f"{what}: only one has {sorted(found.keys() ^ expected.keys())}"
        return
    whole = sum(_norm(value) ** 2 for value in expected.values()) ** 0.5
    for name, reference in expected.items():
        mine = found[name]
        if reference is None or mine is None:
            off = _norm(mine) + _norm(reference)
        else:
            off = _norm(mine.double() - reference.double())
        if not off <= tolerance * max(_norm(reference), least * whole):
            yield f"{what} of {name} is off by {off:.2e}, of {_norm(reference):.2e}"


def _norm(value: torch.Tensor | None) -> float:
    return 0.0 if value is None else float(value.double().norm())


# -- by hand ---------------------------------------------------------------------------------------------------------


def small_failure(setup: Setup, pool: Workers) -> str:
    """Return the smallest setup that is wrong still, as a script, and what is wrong with it."""
    how = outcome(setup, pool).way
    least = smallest(setup, lambda other: outcome(other, pool).way == how)
    return f"{outcome(least, pool).text}\n\n{least.script()}\n\n(drawn: {setup})"


def by_hand(setup: Setup) -> None:
    """Run a setup beside one process and print what became of it."""
    with Workers(setup.world, timeout=240) as pool:
        print(setup, outcome(setup, pool), sep="\n")

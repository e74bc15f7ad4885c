"""Training loops that end-to-end tests run on every rank, each compared with the same loop in one process."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

import autopart
from support.jobs.step_jobs import ALL, cluster, compared, compiled, fresh
from support.models.zoo import CASES
from support.oracles.one_process import gradient_error, gradients_of, plain_loss, plain_step

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)


def optimize(name: str, split: Any, schedule: str, steps: int, clip: float | None = None) -> dict[str, Any]:
    """Train with AdamW and return losses, errors of weights, of optimizer state, and what this rank holds.

    split: a number of stages, or the modules at which stages begin.
    """
    case = ALL[name]
    reference = case.model()
    where = {"stages": split} if isinstance(split, int) else {"cuts": split}
    pipe = compiled(case, fresh(name), case.batch(9), schedule=schedule, micro_batches=3, **where)
    held = {n: p for n, p in pipe.named_parameters() if p.numel()}
    mine = torch.optim.AdamW(held.values(), **ADAMW) if held else None  # an idle rank has no parameters
    plain = torch.optim.AdamW(reference.parameters(), **ADAMW)
    losses, norms = [], []
    for rows in (9, 8, 9, 6)[:steps]:
        losses.append((pipe.step(case.batch(rows)).item(), plain_step(case, reference, case.batch(rows), 3).item()))
        if clip is not None:
            norms.append((pipe.clip_grad_norm_(clip).item(), clip_grad_norm_(reference.parameters(), clip).item()))
        for optimizer in filter(None, (mine, plain)):
            optimizer.step()
            optimizer.zero_grad()
    state, expected = pipe.state_dict(), reference.state_dict()
    references = dict(reference.named_parameters())
    moments = [
        relative(mine.state[p][key], plain.state[references[n]][key])
        for n, p in held.items()
        if mine is not None and p in mine.state
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    return {
        "losses": losses,
        "norms": norms,
        "weights": {n: relative(state[n], expected[n]) for n in expected},
        "moments": max(moments, default=0.0),
        "held": {n: p.detach().clone() for n, p in held.items()},
        "sent_whole": set(state) == set(expected),
    }


def clipped(name: str, kind: float) -> dict[str, Any]:
    """Return the gradient error after clipping, the norms before it and the norm after it, compared with torch."""
    case = ALL[name]
    reference = case.model()
    pipe = compiled(case, fresh(name), case.batch(8), stages=4, micro_batches=2)
    pipe.step(case.batch(8))
    plain_step(case, reference, case.batch(8), 2)
    small = clip_grad_norm_(reference.parameters(), 0.01, kind).item()
    norm = pipe.clip_grad_norm_(0.01, kind).item()
    error, worst = gradient_error(pipe.gradients(), gradients_of(reference))
    untouched = pipe.clip_grad_norm_(1e9, kind).item()
    return {"norm": (norm, small), "error": error, "worst": worst, "after": untouched}


def evaluated(name: str, stages: int) -> dict[str, Any]:
    """Train a step, compare the evaluation loss with one process that loads the state, then train on."""
    case = ALL[name]
    captures, reference = fresh(name), case.model()
    pipe = compiled(case, captures, case.batch(8), stages=stages, micro_batches=2)
    pipe.step(case.batch(8))
    reference.load_state_dict(pipe.state_dict(), strict=True)
    before = pipe.state_dict()
    gradients = pipe.gradients()
    reference.eval()
    with torch.no_grad():
        expected = plain_loss(case, reference, case.batch(5)).item()
    found = pipe.eval_loss(case.batch(5)).item()
    after, kept = pipe.state_dict(), pipe.gradients()
    unchanged = all(torch.equal(after[n], before[n]) for n in before)
    unchanged &= all(g is None or torch.equal(g, gradients[n]) for n, g in kept.items())
    again = pipe.step(case.batch(8)).item()
    return {"loss": (found, expected), "unchanged": unchanged, "again": again, "training": captures.model.training}


def predicted(name: str, stages: int) -> dict[str, Any]:
    """Compare `predict` with the model in eval mode in one process."""
    torch.manual_seed(0)
    case = CASES[name]
    model, reference = case.model(dropout=0.1), case.model(dropout=0.1).eval()
    batch = case.data(6)
    pipe = autopart.compile(model, cluster(), sample=batch, micro_batches=3, stages=stages, costs="analytic")
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        expected = reference(**inputs)
    found = pipe.predict(inputs)
    return {
        "kind": (type(found).__name__, type(expected).__name__),
        "error": relative(found["logits"], expected["logits"]),
        "loss": (pipe.eval_loss(batch).item(), reference(**batch).loss.item()),
    }


def reloaded(name: str) -> dict[str, Any]:
    """Load an invalid state, which must change nothing, and then a valid one into a running pipe, and train on."""
    case = ALL[name]
    other = case.model()
    with torch.no_grad():
        for i, tensor in enumerate(other.state_dict().values()):
            tensor.add_(i + 1)
    pipe = compiled(case, fresh(name), case.batch(8), stages=4, micro_batches=2)
    before = pipe.state_dict()
    try:
        pipe.load_state_dict({**other.state_dict(), "no.such": torch.zeros(1)})
        refusal = ""
    except autopart.UsageError as error:
        refusal = str(error)
    kept = all(torch.equal(t, before[n]) for n, t in pipe.state_dict().items())
    pipe.load_state_dict(other.state_dict())
    state = pipe.state_dict()
    same = state.keys() == other.state_dict().keys()
    same &= all(torch.equal(t, state[n]) for n, t in other.state_dict().items())
    found = compared(
        pipe, pipe.step(case.batch(8)), plain_step(case, other, case.batch(8), 2), other
    )  # and trains on from there
    return {"refusal": refusal, "kept": kept, "same": same, "difference": found}


def dropout(stages: int, schedule: str, seed: int, micros: int = 3, recompute: str = "off") -> Any:
    """Return the losses of three steps on the same batch, the gradients, and whether torch's generator is untouched."""
    case = ALL["dropped"]
    options = {"stages": stages, "schedule": schedule, "micro_batches": micros, "seed": seed, "recompute": recompute}
    pipe = compiled(case, fresh("dropped"), case.batch(9), **options)
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # the user's generator must not matter
    losses = [pipe.step(case.batch(9)).item() for _ in range(3)]
    drawn = torch.rand(1).item()
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    return losses, pipe.gradients(), drawn == torch.rand(1).item()


def without_sample(name: str) -> Any:
    """Return the number of parameters before, and the difference of, the first step of a pipe without a sample."""
    case = ALL[name]
    model, reference = case.model(), case.model()
    pipe = autopart.compile(model, cluster(), loss_fn=case.loss_fn, stages=4, micro_batches=2, costs="analytic")
    before = len(list(pipe.parameters()))
    loss = pipe.step(*case.batch(8))  # positional arguments, as for the model and the loss
    found = compared(pipe, loss, plain_step(case, reference, case.batch(8), 2), reference)
    return before, found


def from_file(name: str, path: str) -> Any:
    """Compare a step of a pipe for a plan file that rank 0 saved, and return its plan."""
    case = ALL[name]
    model, reference = case.model(), case.model()
    pipe = autopart.compile(model, cluster(), sample=case.batch(8), loss_fn=case.loss_fn, plan=path)
    loss = pipe.step(case.batch(8))
    return compared(pipe, loss, plain_step(case, reference, case.batch(8), 2), reference), pipe.plan


def reopened(name: str, times: int) -> list[float]:
    """Return the losses of successive pipes with different numbers of stages in the same processes."""
    case = ALL[name]
    losses = []
    for i in range(times):
        with compiled(case, fresh(name), case.batch(8), stages=4 - i, micro_batches=2) as pipe:
            losses.append(pipe.step(case.batch(8)).item())
    return losses


def disagreeing(what: str) -> None:
    """Compile or step with different arguments on rank 1."""
    rank = int(os.environ["RANK"])
    name = "stack" if what != "model" or rank != 1 else "skips"
    case = ALL[name]
    pipe = compiled(case, fresh(name), case.batch(8), stages=4, micro_batches=2)
    pipe.step(case.batch(8 if what != "batch" or rank != 1 else 6))


def different_weights() -> Any:
    """Compare a step of a model with different weights on every rank, of which those of rank 0 must be used."""
    case = ALL["stack"]
    captures = fresh("stack")
    with torch.no_grad():
        for parameter in captures.model.parameters():
            parameter.add_(int(os.environ["RANK"]))
    pipe = compiled(case, captures, case.batch(8), stages=4, micro_batches=2)
    loss = pipe.step(case.batch(8))
    reference = case.model()
    return compared(pipe, loss, plain_step(case, reference, case.batch(8), 2), reference)


def measured(name: str) -> dict[str, Any]:
    """Return the timeline of a measured step and the actions of its program by rank."""
    case = ALL[name]
    pipe = compiled(case, fresh(name), case.batch(8), stages=4, micro_batches=2)
    step = pipe.timeline(case.batch(8))
    spans = [(span.rank, str(span.action), span.start_ns, span.end_ns) for span in step.spans]
    return {"spans": spans, "actions": [[str(action) for action in pipe.program.part(rank)] for rank in range(4)]}

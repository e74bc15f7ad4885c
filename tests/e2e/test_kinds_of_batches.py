"""Batches that run another program than the sample: remainders of any size, and other tasks and modalities."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from support.models.kind_models import ONE_ROW, ManyTasks, task_batch
from torch import nn

import autopart
from autopart.ir.errors import AutopartError

Draw = dict[str, Any]


def _options(draw: random.Random, ranks: int, cuts: list[str]) -> Draw:
    """Return a plan to ask for: stages, or replicas, or neither on one rank."""
    shape: Draw = {"micro_batches": draw.choice((1, 2, 4)), "costs": "analytic", "cache": False}
    if ranks == 1:
        return shape
    if draw.random() < 0.5:
        return {**shape, "cuts": [draw.choice(cuts)], "replicas": 1}
    return {**shape, "stages": 1, "replicas": 2, "zero": draw.choice((0, 1))}


def differing(pipe: autopart.Pipe, plain: nn.Module) -> list[str]:
    """Return the parameters whose gradients differ from those of the plain model; None is not zero."""
    found = pipe.gradients()
    return [
        name
        for name, parameter in plain.named_parameters()
        if (found[name] is None) != (parameter.grad is None)
        or (found[name] is not None and not torch.allclose(found[name], parameter.grad, atol=1e-5))
    ]


def remainders(ranks: int, seed: int, names: tuple[str, ...], count: int) -> list[str]:
    """Step, evaluate and predict batches of any number of rows; return what differs from plain training, or raises."""
    draw, wrong = random.Random(seed), []
    for name in names:
        make, batch = ONE_ROW[name]
        torch.manual_seed(seed)
        model = make()
        plain, options = copy.deepcopy(model), _options(draw, ranks, ["head", "body"] if name == "masked" else ["head"])
        sample = batch(options["micro_batches"] * options.get("replicas", 1) * draw.choice((2, 3)))
        with autopart.compile(model, f"cpu:{ranks}", sample=sample, **options) as pipe:
            most = next(iter(sample.values())).shape[0] + 1
            for rows in (1, *(draw.randint(1, most) for _ in range(count))):
                given = batch(rows)
                try:
                    problems = _compared(pipe, plain, given)
                except AutopartError as error:
                    problems = [str(error)]
                wrong += [f"{name} {options} {rows} rows: {problem}" for problem in problems]
    return wrong


def _compared(pipe: autopart.Pipe, plain: nn.Module, batch: Any) -> list[str]:
    plain.zero_grad()
    pipe.zero_grad()
    loss = plain(**batch)
    loss.backward()
    problems = [] if torch.allclose(pipe.step(batch), loss.detach(), atol=1e-5) else ["loss"]
    problems += differing(pipe, plain)
    with torch.no_grad():
        expected = plain(**batch)
    problems += [] if torch.allclose(pipe.eval_loss(batch), expected, atol=1e-5) else ["eval_loss"]
    return problems + ([] if torch.allclose(pipe.predict(batch), expected, atol=1e-5) else ["predict"])


def tasks(ranks: int, seed: int, count: int) -> tuple[list[str], list[str]]:
    """Train a model with batches of several tasks; return what differs from plain training, and what was refused."""
    draw, wrong, refused = random.Random(seed), [], []
    torch.manual_seed(seed)
    model = ManyTasks()
    plain, options = copy.deepcopy(model), _options(draw, ranks, ["trunk.0", "trunk.1"])
    sample = _drawn(draw)
    said = f"{options} {sample[:2]}"
    with autopart.compile(model, f"cpu:{ranks}", sample=task_batch(*sample[:2], 8), **options) as pipe:
        ours = torch.optim.AdamW(pipe.parameters(), lr=0.05, weight_decay=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
        for _ in range(count):
            batch, none = task_batch(*(kind := _drawn(draw))), draw.random() < 0.7
            try:
                loss = pipe.step(batch)
            except AutopartError as error:
                refused.append(f"{said} {kind}: {type(error).__name__} {error}")
                continue
            expected = plain(**batch)
            expected.backward()
            problems = [] if torch.allclose(loss, expected.detach(), atol=1e-5) else ["loss"]
            problems += differing(pipe, plain)
            if draw.random() < 0.3:
                pipe.clip_grad_norm_(0.5)
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad(set_to_none=none)
            state = pipe.state_dict()
            problems += [n for n, t in plain.state_dict().items() if not torch.allclose(state[n], t, atol=1e-4)]
            wrong += [f"{said} {kind}: {problem}" for problem in problems]
    return wrong, refused


def _drawn(draw: random.Random) -> tuple[str, str, int]:
    return draw.choice(("a", "b", "first", "tied")), draw.choice(("t", "v", "tv")), draw.choice((8, 8, 5, 3))


# -- tests -----------------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow
NAMES = tuple(ONE_ROW)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 12))])
def test_a_remainder_of_any_size_is_exact_on_one_rank(seed):
    assert remainders(1, seed, NAMES if seed else ("masked",), 2) == []


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=SLOW) for seed in range(12, 24))])
def test_a_remainder_of_any_size_is_exact_on_two_ranks(pair, seed):
    for wrong in pair.run(remainders, 2, seed, NAMES if seed > 3 else ("squeezed",), 3):
        assert wrong == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 12))])
def test_batches_of_any_task_train_on_one_rank(seed):
    assert tasks(1, seed, 6) == ([], [])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in range(12, 32))])
def test_batches_of_any_task_train_on_two_ranks_or_are_refused_by_name(pair, seed):
    """Refused are only batches for which the weight that a head shares with the embedding lies on another stage than
    they need: the sample, or they, are of that head's task."""
    for wrong, refused in pair.run(tasks, 2, seed, 6):
        assert wrong == []
        for text in refused:
            assert "PlanError" in text and "('tied'" in text, text
            assert "compile with a batch of this kind as the sample" in text

"""What a model's Python asks about the numbers of its batch: answered, watched, and exact in micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.grids import sampled
from support.languages.refusals import refused
from support.oracles.one_process import gradient_error, gradients_of
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, capture
from autopart.capture.python.guards import CaptureWarning
from autopart.ir.errors import CaptureError, RefusedError
from autopart.ir.graph import Size

ROWS, LENGTH, WIDTH = 6, 5, 8
Body = Callable[..., torch.Tensor]


class Reader(nn.Module):
    """An embedding and two layers; `body` is what forward does."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.second = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12)
        self.body = body

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return self.first(self.words(ids)).tanh()

    def forward(self, *args: Any) -> torch.Tensor:
        return self.body(self, *args)


def ids(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(2, 12, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def mask(*lengths: int) -> torch.Tensor:
    return (torch.arange(LENGTH)[None, :] < torch.tensor(lengths)[:, None]).long()


def placed(*starts: int) -> torch.Tensor:
    """Ids in which two 1s stand in every row, from these places on."""
    found = ids()
    starts += (0,) * (ROWS - len(starts))
    for row, start in enumerate(starts):
        found[row, start : start + 2] = 1
    return found


def uneven() -> torch.Tensor:
    """As many 1s in all, three of them in the first row and one in the second."""
    found = placed(0, 1, 2, 3, 1, 0)
    found[0, 2], found[1, 1] = 1, 2
    return found


def checked(m: Reader, x: torch.Tensor) -> torch.Tensor:
    if x.max() >= 12:
        raise ValueError("no such word")
    return m.hidden(x).square().mean()


def shortcut(m: Reader, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Another program where nothing is masked; some micro-batches have no mask where the batch has one."""
    hidden = m.hidden(x)
    if not torch.all(seen == 1):
        hidden = hidden * 2 * seen[..., None]
    return m.second(hidden).square().mean()


def counted(m: Reader, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return (m.hidden(x).sum(-1) * seen).sum() / int(seen.sum())


def longest(m: Reader, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return m.hidden(x)[:, : seen.sum(1).max()].square().mean()


def written(m: Reader, x: torch.Tensor) -> torch.Tensor:
    """The answer depends on what an op has written over."""
    total = torch.zeros(2, dtype=torch.long)
    total[0] = x.sum()
    total.add_(1)
    return m.hidden(x).mean() if total[0] > 3 else m.hidden(x).square().mean()


def picked(m: Reader, x: torch.Tensor) -> torch.Tensor:
    """Two places of every row."""
    return m.second(m.hidden(x)[x == 1]).square().mean()


def filled(m: Reader, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    images = torch.cat(list(m.first(given)), dim=0)
    return m.second(m.hidden(x).masked_scatter((x == 1)[..., None], images)).square().mean()


def hidden_from(m: Reader, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A mask written row by row, and then written by."""
    last = torch.zeros_like(x)
    last[torch.arange(len(x)), lengths - 1] = 1
    seen = last.flip(-1).cumsum(-1).flip(-1).bool()
    hidden = m.first(m.words(x))
    hidden[~seen] = 0
    return hidden.square().mean()


def listed(m: Reader, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    parts = m.hidden(x).flatten(0, 1).split(sizes.tolist())
    return torch.cat([part.reshape(-1, WIDTH) for part in parts]).square().mean()


def spelled(reduction: str) -> Body:
    """As transformers takes the loss of speech: targets laid end to end."""

    def body(m: Reader, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = labels >= 0
        found = m.second(m.hidden(x)).log_softmax(-1).transpose(0, 1)
        given = torch.full((len(x),), LENGTH)
        targets = labels.masked_select(wanted)
        return F.ctc_loss(found, targets, given, wanted.sum(-1), reduction=reduction, zero_infinity=True)

    return body


LABELS = torch.tensor([[3, 4, 0], [5, -1, -1], [2, 7, -1], [3, 3, 3], [-1, -1, -1], [8, 9, -1]])
IMAGES = torch.randn(ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(4))
PADDED = mask(5, 5, 5, 3, 2, 4)

CASES: dict[str, tuple[Body, int, list[tuple[torch.Tensor, ...]], int]] = {
    "a check": (checked, 3, [(ids(),), (ids(1),)], 2),
    "a branch of the whole batch": (shortcut, 3, [(ids(), PADDED), (ids(), mask(*[5] * ROWS)), (ids(1), PADDED)], 4),
    "a number as divisor": (counted, 3, [(ids(), PADDED), (ids(), mask(*[4] * ROWS))], 4),
    "a number as length": (longest, 2, [(ids(), mask(1, 2, 2, 3, 4, 1))], 2),
    "what was written over": (written, 2, [(ids(),)], 2),
    "as many of each row": (picked, 3, [(placed(0, 1, 2, 3, 1, 0),), (placed(1, 1, 0, 3, 3, 2),)], 2),
    "any number of the whole batch": (picked, 1, [(uneven(),), (placed(1, 1, 0, 3, 3, 2),)], 3),
    "places filled row by row": (filled, 3, [(placed(0, 1, 2, 3, 1, 0), IMAGES), (placed(3, 1, 1, 2, 0), IMAGES)], 2),
    "places filled across rows": (filled, 1, [(uneven(), IMAGES)], 2),
    "places written by rows": (hidden_from, 3, [(ids(), torch.tensor([1, 5, 3, 2, 4, 5]))], 2),
    "lists of sizes": (listed, 2, [(ids(), torch.full((ROWS,), LENGTH))], 2),
    "a sum over spellings": (spelled("sum"), 3, [(ids(), LABELS), (ids(1), LABELS.flip(0))], 2),
    "a mean over spellings": (spelled("mean"), 2, [(ids(), LABELS), (ids(1), LABELS.flip(0))], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(CASES))
def test_what_is_asked_of_the_batch_is_exact_for_every_batch(name):
    body, micros, batches, captures = CASES[name]
    model, plain = Reader(body), Reader(body)
    with autopart.compile(model, "cpu:1", sample=batches[0], micro_batches=micros, costs="analytic") as pipe:
        for batch in batches:
            model.zero_grad()
            plain.zero_grad()
            expected = plain(*batch)
            expected.backward()
            torch.testing.assert_close(pipe.step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
            error, worst = gradient_error(pipe.gradients(), gradients_of(plain))
            assert error <= 1e-5, worst
        assert len(pipe._core.captures.kept) <= captures


def _activation(m: Reader, x: torch.Tensor) -> torch.Tensor:
    return m.hidden(x).mean() if m.hidden(x).sum() > 0 else m.hidden(x).sum()


def _logged(m: Reader, x: torch.Tensor) -> torch.Tensor:
    loss = m.hidden(x).mean()
    m.last = float(loss.detach())
    return loss


def _random(m: Reader, x: torch.Tensor) -> torch.Tensor:
    return m.hidden(x).mean() * (2 if torch.rand(()) > 0.5 else 1)


def _row_by_row(m: Reader, x: torch.Tensor) -> torch.Tensor:
    return sum(m.hidden(x[row : row + 1, : int(x[row, 0])]).mean() for row in range(len(x))) / len(x)


@pytest.mark.parametrize(
    ("body", "batch", "kind", "words"),
    [
        (_activation, (ids(),), CaptureError, ("first.", "torch.where", __file__)),
        (_logged, (ids(),), CaptureError, ("reads a number", "output", __file__)),
        (_random, (ids(),), CaptureError, ("random numbers", __file__)),
        (_row_by_row, (ids(),), RefusedError, ("the number of rows", "micro_batches=1", __file__)),
        (picked, (uneven(),), RefusedError, ("x[mask]", "micro_batches=1", __file__)),
        (filled, (uneven(), IMAGES), RefusedError, ("masked_scatter",)),
    ],
)
def test_what_no_answer_settles_is_refused_by_name(body, batch, kind, words):
    with refused(kind, *words):
        autopart.compile(Reader(body), "cpu:1", sample=batch, micro_batches=2, costs="analytic")


def test_the_whole_batch_is_asked_once_and_answers_for_its_parts():
    cache, batch = CaptureCache(Reader(shortcut)), flatten((ids(), PADDED))
    part = cache(batch, Size(2))
    assert part.questions is not None
    assert [value for _, _, value in part.questions.answers] == [False]
    assert cache.judged(batch).answers == part.questions.answers
    other = flatten((ids(), mask(*[5] * ROWS)))
    assert cache.judged(other).answers is None
    assert cache(other, Size(2)) is not part
    assert cache(batch, Size(2)) is part


def test_a_model_that_asks_nothing_has_no_questions():
    model = Reader(lambda m, x: m.hidden(x).mean())
    assert capture(model, flatten(ids())).questions is None


def test_numbers_that_every_batch_has_anew_are_warned_of():
    model = Reader(counted)
    cache = CaptureCache(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(8):
            cache(flatten((ids(rows=2), mask(1 + length // 2, length - length // 2))), Size(2))
    told = [str(warning.message) for warning in caught if warning.category is CaptureWarning]
    assert len(told) == 1 and "test_questions.py" in told[0]


META = torch.device("meta")
"""Stands for a device: its numbers cannot be read."""


@pytest.mark.parametrize(
    ("body", "batch"), [(checked, (ids(),)), (shortcut, (ids(), PADDED)), (counted, (ids(), PADDED))]
)
def test_whole_numbers_of_a_batch_in_host_memory_are_asked_without_the_device(body, batch):
    questions = capture(Reader(body), flatten(batch)).questions
    assert questions is not None and all(question.exact for question in questions.asked)
    assert replace(questions, device=META).hold(batch)
    others = (*batch[:-1], torch.full_like(batch[-1], 1))
    assert replace(questions, device=META).hold(others) == questions.hold(others)


def test_a_mask_is_asked_without_the_device_what_it_hides():
    def attended(m: Reader, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        y = m.hidden(x)[:, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=(seen != 0)[:, None, None]).square().mean()

    everything, padded = (ids(), mask(*[LENGTH] * ROWS)), (ids(), PADDED)
    questions = capture(Reader(attended), flatten(everything)).questions
    assert questions is not None
    assert replace(questions, device=META).hold(everything)
    assert not replace(questions, device=META).hold(padded)


def test_fractions_are_asked_on_the_device_as_the_model_would():
    def divided(m: Reader, x: torch.Tensor) -> torch.Tensor:
        return m.hidden(x).mean() * (2 if (x.float() / 3).sum() > 7.3 else 1)

    questions = capture(Reader(divided), flatten((ids(),))).questions
    assert questions is not None and not any(question.exact for question in questions.asked)
    assert questions.hold((ids(),))
    with pytest.raises((RuntimeError, NotImplementedError)):
        replace(questions, device=META).hold((ids(),))

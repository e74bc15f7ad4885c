"""A length of sequences that was seen before costs neither a capture nor an exchange."""

from __future__ import annotations

from unittest import mock

import torch
from support.workers import Workers
from torch import nn

import autopart
from autopart.runtime.group.world import World

EXCHANGES = ("begin_reducing", "gather_numbers", "gather_objects", "broadcast_object")


class Reader(nn.Module):
    """Reads sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.inner(self.words(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(length: int) -> dict[str, torch.Tensor]:
    """Return 4 rows of this length, without and with ignored labels."""
    ids = torch.randint(32, (4, length), generator=torch.Generator().manual_seed(length))
    labels = ids.clone()
    labels[0, 0] = -100
    return {"ids": ids, "labels": labels}


def counted(lengths: tuple[int, ...]) -> tuple[int, int, list[int], list[int]]:
    """Return the captures of a first round over all lengths, those of a second, and the exchanges of the steps of the
    first kind and of all other kinds in a third round."""
    torch.manual_seed(0)
    with autopart.compile(
        Reader(), "cpu:2", sample=batch(lengths[0]), stages=2, micro_batches=2, costs="analytic"
    ) as p:
        captures = p.session.captures
        for length in lengths:
            p.step(batch(length))
        first = captures.made
        for length in lengths:
            p.step(batch(length))
        second = captures.made - first
        kept = captures.kept
        said = p.explain().splitlines()[-1]
        assert said.startswith(f"captures of this rank: {len(kept)} of at most 128, ")
        assert said.endswith(f" of at most 1024 MiB (estimated), {kept.hits} hits, {captures.made} made")
        exchanges = []
        for length in lengths:
            with mock.patch.multiple(World, **{n: _counting(n) for n in EXCHANGES}):
                _calls.clear()
                p.step(batch(length))
                exchanges.append(len(_calls))
    return first, second, exchanges[:1], exchanges[1:]


_calls: list[str] = []


def _counting(name: str):
    plain = getattr(World, name)

    def counting(*args, **kwargs):
        _calls.append(name)
        return plain(*args, **kwargs)

    return counting


# -- tests -----------------------------------------------------------------------------------------------------------


LENGTHS = tuple(range(5, 9))


def test_lengths_that_were_seen_are_not_captured_again(pair: Workers) -> None:
    for first, again, planned, others in pair.run(counted, LENGTHS):
        assert first >= len(LENGTHS)
        assert again == 0
        assert set(others) == set(planned), "exchanges of a step"

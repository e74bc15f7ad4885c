"""Steps in which only some ranks are given the batch: exact, or refused on all ranks."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.jobs.step_jobs import EVERY, cluster, compiled, fresh, refusal_of, replica_options
from support.oracles.one_process import Difference, Expected, difference, plain_loss, plain_step, rows_of
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler

import autopart
from autopart.ir.errors import AutopartError

Counts = tuple[int, ...]


def select_rows(batch: Any, rows: list[int]) -> Any:
    """Return the given rows of a batch."""
    whole = rows_of(batch)

    def pick(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == whole else leaf

    return pytree.tree_map(pick, batch)


def own_part(pipe: autopart.Pipe, batch: Any, rows: list[int]) -> Any:
    """Return what this rank passes to a step over shards."""
    return select_rows(batch, rows) if pipe.needs_data and rows else None


def sampler_rows(pipe: autopart.Pipe, rows: int) -> list[int]:
    """Return the rows that torch's DistributedSampler assigns to this rank."""
    number, of = pipe.data_shard()
    return list(DistributedSampler(range(rows), num_replicas=of, rank=number, shuffle=False))  # type: ignore[arg-type]


def compare_feeds(name: str, counts: Counts, micros: int, rows: tuple[int, ...]) -> list[tuple[str, Difference]]:
    """Step over batches passed whole, cut by `data_rows` and cut by a sampler; compare each with one process."""
    case, found = EVERY[name], []
    dtype = torch.float64
    with compiled(case, fresh(name, dtype), case.data(rows[0], dtype), **replica_options(counts, micros)) as pipe:
        for count in rows:
            batch = case.data(count, dtype)
            reference = case.model(dtype=dtype)
            expected = Expected.of(plain_step(case, reference, batch, micros), reference)
            feeds = {
                "whole": (batch if pipe.needs_data else None, False),
                "rows": (own_part(pipe, batch, list(pipe.data_rows(count))), True),
            }
            if count % len(pipe.session.standing.needing) == 0:
                feeds["sampler"] = own_part(pipe, batch, sampler_rows(pipe, count)), True
            for way, (given, sharded) in feeds.items():
                pipe.zero_grad()
                loss = pipe.step(given, sharded=sharded).item()
                found.append((f"{way} {count}", difference(loss, pipe.gradients(), {}, expected, dtype)))
            given = batch if pipe.rank == pipe.session.standing.needing[0] else None
            evaluated = pipe.eval_loss(given).item()
            reference.eval()
            plain = plain_loss(case, reference, batch).item()
            found.append((f"eval {count}", Difference((evaluated - plain) / plain, 0.0, "", 0.0, 0)))
    return found


def masked_shards(counts: Counts, micros: int, rows: int) -> list[float]:
    """Compare steps over shards with steps over the whole batch for a model with dropout.

    The shards are cut by `data_rows` and by a sampler. Return the differences of the losses and gradients.
    """
    case, apart = EVERY["dropped"], []
    with compiled(case, fresh("dropped"), case.data(rows), **replica_options(counts, micros, seed=3)) as pipe:
        batch = case.data(rows)
        of = pipe.data_shard()[1]
        each = rows // micros // of  # rows of a shard in a micro-batch
        order = [shard + of * (each * micro + place) for micro in range(micros) for shard in range(of)
                 for place in range(each)]  # fmt: skip
        for whole, own in (
            (batch, list(pipe.data_rows(rows))),
            (select_rows(batch, order), sampler_rows(pipe, rows)),
        ):
            results = []
            for given, sharded in ((whole, False), (own_part(pipe, batch, own), True)):
                pipe.steps = 5
                pipe.zero_grad()
                loss = pipe.step(given, sharded=sharded).item()
                results.append((loss, pipe.gradients()))
            (loss, gradients), (other, others) = results
            apart.append(abs(loss - other) / abs(loss))
            apart.extend(float((g - others[n]).abs().max()) for n, g in gradients.items() if g is not None)  # type: ignore[operator]
    return apart


def predicted() -> bool:
    """Return whether every rank's prediction equals the model's output when only some ranks have the batch."""
    case = EVERY["stack"]
    x, y = case.data(8)
    with compiled(case, fresh("stack"), (x, y), stages=2, micro_batches=2) as pipe:
        found = pipe.predict(x if pipe.needs_data else None)
        model = case.model().eval()
        return torch.allclose(found, model(x), atol=1e-6)


def refused() -> dict[str, str]:
    """Return the error of each call whose ranks pass inconsistent batches. A valid step follows each call."""
    case, messages = EVERY["stack"], {}
    x, y = case.data(8)
    with compiled(case, fresh("stack"), (x, y), **replica_options((2,), 2)) as pipe:
        few = 5 - 4 * pipe.rank
        calls: dict[str, Callable[[], Any]] = {
            "missing": lambda: pipe.step(None),
            "evaluated": lambda: pipe.eval_loss((x, y) if pipe.rank else None),
            "one": lambda: pipe.step((x, y) if pipe.rank == 0 else None),
            "sizes": lambda: pipe.step((x[:few], y[:few]), sharded=True),
            "mixed": lambda: pipe.step((x, y), sharded=pipe.rank == 0),
        }
        before = pipe.step((x, y)).item()
        for what, call in calls.items():
            messages[what] = str(refusal_of(call))
            assert pipe.step((x, y)).item() == before
    return messages


class ReadsValues(nn.Module):
    """A model whose forward() branches on a value of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if scale.max() > 1:
            y = y * 2
        return self.second(y).pow(2).mean()


def value_branches(counts: Counts, sharded: bool) -> tuple[list[float], str]:
    """Return the loss errors of a model that branches on batch values, or the error that sharded batches raise."""
    torch.manual_seed(3)
    model = ReadsValues()
    plain, found = copy.deepcopy(model), []
    x = torch.randn(8, 4)
    small, large = torch.full((8,), 0.5), torch.full((8,), 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = autopart.compile(model, cluster(), sample=(x, small), costs="analytic", **replica_options(counts, 2))
    with pipe:
        for scale in (small, large, small):
            batch = (x, scale)
            if sharded:
                try:
                    pipe.step(*own_part(pipe, batch, list(pipe.data_rows(8))) or (None,), sharded=True)
                except AutopartError as error:
                    return [], str(error)
            else:
                loss = pipe.step(batch if pipe.needs_data else None).item()
                found.append(abs(loss - plain(x, scale).item()))
    return found, ""


# -- tests -----------------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow


def _check(pool, name, counts, micros, rows):
    for found in pool.run(compare_feeds, name, counts, micros, rows):
        for way, off in found:
            assert off.within(torch.float64), (way, off)


@pytest.mark.parametrize(
    ("name", "counts", "micros", "rows"),
    [
        ("tied", (2, 1), 2, (8,)),  # a mean over tokens with ignored labels
        pytest.param("late_inputs", (1, 2), 2, (6,), marks=SLOW),  # Python values, and inputs read by a later stage
        pytest.param("llama_tied", (2, 1), 2, (8,), marks=SLOW),  # masks, which the whole batch shows to be unnecessary
        pytest.param("tied", (2, 2), 3, (10, 14, 3), marks=SLOW),  # also fewer rows than replicas
        *(
            pytest.param(name, counts, micros, (12, 7, 5, 10), marks=SLOW)
            for name, counts, micros in itertools.product(
                ("tied", "stack_sum", "shared_by_all", "rotary"), ((2, 2), (3, 1), (1, 3), (2, 1), (4,)), (1, 2, 3)
            )
        ),
    ],
)
def test_a_step_equals_one_process_however_the_batch_is_given(workers, name, counts, micros, rows):
    _check(workers, name, counts, micros, rows)


@pytest.mark.parametrize("counts", [(2, 1), pytest.param((3, 1), marks=SLOW), pytest.param((4,), marks=SLOW)])
def test_dropout_masks_do_not_depend_on_how_the_batch_is_given(workers, counts):
    for apart in workers.run(masked_shards, counts, 2, 12 if counts[0] == 3 else 8):
        assert max(apart) < 1e-6


def test_a_prediction_needs_the_batch_on_one_rank(pair):
    assert all(pair.run(predicted))


def test_inconsistent_batches_are_refused_on_all_ranks(pair):
    for messages in pair.run(refused):
        assert "rank 0 was given no batch" in messages["missing"]
        assert "rank 0 was given no batch" in messages["evaluated"]
        assert "rank 1 was given no batch" in messages["one"]
        assert "shards of 5 and 1 rows" in messages["sizes"]
        assert "sharded= differs" in messages["mixed"]


def test_ranks_without_the_batch_follow_branches_on_its_values(pair):
    for apart, _ in pair.run(value_branches, (1, 1), False):
        assert len(apart) == 3 and max(apart) < 1e-5


def test_a_model_that_reads_values_of_the_batch_refuses_shards(pair):
    for _, messages in pair.run(value_branches, (2,), True):
        assert "reads numbers of the whole batch" in messages

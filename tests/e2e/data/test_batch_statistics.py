"""Batch norms in stages with replicas, each with statistics of its own.

`test_any_plan` draws statistics over the whole micro-batch (sync_batchnorm)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.jobs.step_jobs import EVERY, Counts, cluster, compiled, fresh, refusal_of, replica_options
from support.oracles.one_process import Expected, case_rows, counters_of, difference, plain_loss, plain_step, rows_of

import autopart
from autopart.ir.errors import AutopartError
from autopart.session.step.parts import micro_cut

PICTURES = EVERY["pictures"]
DTYPE = torch.float64


def _case(name: str) -> Any:
    return EVERY[name]


def _model(name: str) -> Any:
    return fresh(name, DTYPE)


def normed(counts: Counts) -> dict[str, Any]:
    """Compare one step of a replicated stage with one process that runs the replicas' parts in order.

    Also compares each rank's running statistics with those of the first replica's parts alone.
    """
    case, rows = EVERY["batch_norm"], 12
    batch, model, first = case.data(rows), case.model(), case.model()
    with compiled(case, fresh("batch_norm"), batch, **replica_options(counts, 2)) as pipe:
        loss = pipe.step(batch).item()
        gradients = pipe.gradients()
        buffers = {n: t.clone() for n, t in pipe.session.tensors.held.items() if "running" in n or "tracked" in n}
    each = rows // 2 // counts[0]
    expected, again = 0.0, counters_of(first)
    for place, start in enumerate(range(0, rows, each)):
        part = case_rows(batch, start, start + each)
        share = plain_loss(case, model, part) * (each / rows)
        share.backward()
        expected += share.item()
        if place % counts[0] == 0:
            again()
            plain_loss(case, first, part)
    wanted = {n: t for n, t in first.named_buffers() if n in buffers}
    off = max((buffers[n].double() - t.double()).abs().max().item() for n, t in wanted.items())
    found = difference(loss, gradients, {}, Expected.of(torch.tensor(expected), model))
    return {"difference": found, "buffers": off, "compared": len(wanted)}


def refused_in_turn() -> str:
    """Return the error for synchronized batch statistics with replica_policy="turn"."""
    options = replica_options((2,), 2, sync_batchnorm=True, replica_policy="turn")
    return str(refusal_of(lambda: compiled(PICTURES, PICTURES.model(), PICTURES.data(8), **options).close()))


def in_turn(name: str, counts: Counts, micros: int, rows: tuple[int, ...], recompute: str = "off") -> dict[str, Any]:
    """Compare steps with replica_policy="turn" with one process over the micro-batches.

    Also compares this rank's buffers with one process over the micro-batches of the first replica of its stage.
    """
    case, found, off = _case(name), [], 0.0
    reference, first = case.model(dtype=DTYPE), case.model(dtype=DTYPE)
    asked = replica_options(counts, micros, recompute=recompute, replica_policy="turn")
    with compiled(case, _model(name), case.data(rows[0], DTYPE), **asked) as pipe:
        stage = next(iter(pipe.plan.decision.stages_of_rank(pipe.rank)), None)
        count = counts[stage] if stage is not None else 1
        for step_rows in rows:
            batch = case.data(step_rows, DTYPE)
            loss = pipe.step(batch).item()
            cut = micro_cut(step_rows, pipe.plan.micro_rows)
            expected = Expected.of(plain_step(case, reference, batch, len(cut)), reference)
            found.append(difference(loss, pipe.gradients(), {}, expected, DTYPE))
            again = counters_of(first)
            for micro in range(0, len(cut), count):
                again()
                plain_loss(case, first, case_rows(batch, sum(cut[:micro]), sum(cut[: micro + 1])))
        held = {n: t for n, t in pipe.session.tensors.held.items() if "running" in n or "tracked" in n}
        wanted = dict(first.named_buffers())
        off = max(((t - wanted[n]).abs().max().item() for n, t in held.items()), default=0.0)
    return {"differences": found, "buffers": off, "compared": len(held), "rows": rows_of(batch)}


def verified(name: str, counts: Counts, synced_norms: bool = True) -> tuple[bool, str, int, str]:
    """Return the result of `verify` for a plan with replicas: ok, reference, number of buffers, or the error."""
    case = _case(name)
    try:
        found = autopart.verify(
            case.model(dtype=DTYPE), cluster(), sample=case.data(13, DTYPE), loss_fn=case.loss_fn, costs="analytic",
            sync_batchnorm=synced_norms, **replica_options(counts, 2),
        )  # fmt: skip
    except AutopartError as error:
        return False, "", 0, str(error)
    return found.ok, found.reference, len(found.buffers), ""


# -- tests -----------------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.slow
def test_replicas_that_take_turns_do_not_share_statistics(pair):
    for message in pair.run(refused_in_turn):
        assert "cannot share batch statistics: its replicas take turns" in message and 'policy "split"' in message


@pytest.mark.parametrize(
    ("name", "counts", "micros", "rows", "recompute"),
    [
        pytest.param("pictures", (2, 1), 3, (7, 5), "off", marks=SLOW),
        pytest.param("resnet", (2, 2), 4, (18, 13), "all", marks=SLOW),
        pytest.param("batch_norm", (1, 2), 4, (18, 13), "off", marks=SLOW),
    ],
)
def test_micro_batches_taken_in_turn_have_separate_statistics(workers, name, counts, micros, rows, recompute):
    compared = set()
    for result in workers.run(in_turn, name, counts, micros, rows, recompute):
        for off in result["differences"]:
            assert off.within(torch.float64), off
        assert result["buffers"] < 1e-10
        compared.add(result["compared"])
    assert max(compared) > 0


def test_batch_statistics_are_per_replica_and_running_ones_of_the_first_replica(pair):
    for result in pair.run(normed, (2,)):
        assert result["difference"].within(torch.float32), result["difference"]
        assert result["compared"] and result["buffers"] < 1e-6


@pytest.mark.parametrize(
    ("name", "counts"),
    [("pictures", (2,)), pytest.param("resnet", (2, 2), marks=SLOW)],
)
def test_verify_compares_shared_statistics_with_one_process(workers, pair, name, counts):
    for good, reference, buffers, message in (pair if counts == (2,) else workers).run(verified, name, counts):
        assert good and buffers, message
        assert "the model itself, over the same micro-batches" in reference


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2,), (2, 1)])
def test_verify_cannot_compare_statistics_of_replicas_with_one_process(workers, counts):
    for good, *_, message in workers.run(verified, "pictures", counts, False):
        assert not good and "cannot be compared with one process" in message and "sync_batchnorm=True" in message

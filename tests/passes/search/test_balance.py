"""Balance: all cuts of a pipeline at once, where single moves are of no help."""

from __future__ import annotations

from dataclasses import replace

from support.graphs import cluster, graph, source

from autopart.passes.pipeline import _spaces
from autopart.passes.search.archive import Archive
from autopart.passes.search.balance import balanced
from autopart.passes.search.evaluation import Candidate
from autopart.passes.search.layout import Layout
from autopart.passes.search.partition import Partition
from autopart.passes.search.space import PlanRequest

STAGES, BLOCKS = 6, 36


def test_all_cuts_move_together_as_long_as_the_step_gets_shorter() -> None:
    """Stages of 1, 7, 7, 7, 7, 7 blocks; with few micro-batches equal ones are the best."""
    text = "; ".join(f"v{i}:10 #{1 if i % 2 else 3} <- {f'v{i - 1}' if i else 'x'}" for i in range(BLOCKS))
    g, c = graph(text, input_bytes=1), cluster(STAGES)
    request = PlanRequest(((1,) * (2 * STAGES),), stages=STAGES)
    space = _spaces(source(g, c), g, c, request).fine
    bounds = (0, *range(1, BLOCKS, 7))
    uneven = Candidate(
        Partition((*bounds[:STAGES], BLOCKS), (1,) * STAGES, 0),
        Layout(1, STAGES, 1, tuple(range(STAGES))),
        request.micro_rows[0],
        "1f1b",
    )
    archive = Archive()
    before = archive.evaluate(space, uneven)
    after = balanced(before, archive)
    equal = replace(uneven, partition=replace(uneven.partition, bounds=tuple(range(0, BLOCKS + 1, BLOCKS // STAGES))))
    assert after.step_ns < before.step_ns
    assert after.step_ns <= archive.evaluate(space, equal).step_ns
    alone = archive.evaluate(space, replace(uneven, partition=Partition((0, BLOCKS), (1,), 0)))
    assert balanced(alone, archive) is alone

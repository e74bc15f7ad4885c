"""The ways to cut a batch into micro-batches that are worth trying."""

from __future__ import annotations

from autopart.batch.batch import Batch, split_rows
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.graph import Size
from autopart.options import Options

MOST_MICRO_BATCHES = 1 << 16
"""Most micro-batches that the planner chooses by itself."""
Splits = tuple[tuple[int, ...], ...]
"""Ways to split a batch, each the rows of its micro-batches, largest first."""


def ways_to_split(batch: Batch, micro_batches: int | None) -> Splits:
    """Return the splits of a batch that are tried, those with the largest micro-batches first.

    micro_batches: the option; None: the divisors of the number of rows, and powers of two if there are few divisors.
    """
    if batch.rows is None:
        if micro_batches not in (None, 1):
            raise UsageError(
                f"micro_batches is {micro_batches} and the batch has no rows",
                why="none of its tensors has an axis",
                fix="use micro_batches=1",
            )
        return ((1,),)
    if micro_batches:
        return (split_rows(batch.rows, micro_batches),)
    return tuple(split_rows(batch.rows, count) for count in micro_counts(batch.rows))


def micro_counts(rows: int) -> tuple[int, ...]:
    """Return numbers of micro-batches to try, ascending: the divisors, and powers of two if there are few."""
    most = min(rows, MOST_MICRO_BATCHES)
    divisors = [count for count in range(1, most + 1) if rows % count == 0]
    powers = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return tuple(divisors if len(divisors) >= min(4, len(powers)) else sorted({*divisors, *powers}))


def other_sizes(splits: Splits, batch: Batch) -> list[Size] | None:
    """Return the sizes above one row that micro-batches may have, in order; None if the batch cannot be split."""
    if batch.rows in (None, 1):
        return None
    # The whole batch first: the model's Python may take another branch for it than for a micro-batch.
    return [Size(batch.rows), *(Size(rows) for micro_rows in splits for rows in sorted(set(micro_rows)) if rows > 1)]


def first_size(splits: Splits, batch: Batch, cluster: Cluster, options: Options) -> Size:
    """Return the size to capture first: that of about four micro-batches a stage (bubble 1/5, GPipe section 2.3).

    It has several rows if possible: a program of one row may lack ops that others have, such as an `expand`.
    """
    if batch.rows in (None, 1):
        return Size(1)
    stages = options.stages or cluster.world
    wanted = 4 * stages if stages > 1 else 1
    several = [micro_rows for micro_rows in splits if max(micro_rows) > 1]
    if not several:
        return Size(2)
    nearest = min(several, key=lambda micro_rows: abs(len(micro_rows) - wanted))
    return Size(max(nearest))

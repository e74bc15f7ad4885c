"""Sums of sparse gradients over the replicas of a stage: entries are gathered, since each replica has its own rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopart.runtime.sums.reduce import gradient_dtype


def summed_sparse(parameter: torch.nn.Parameter, ranks: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor | None:
    """The sum of sparse gradients: all of their entries, of every replica in order."""
    own = (parameter.grad if parameter.grad is not None else _empty_rows(parameter)).coalesce()
    counts = [torch.zeros(1, dtype=torch.int64, device=parameter.device) for _ in ranks]
    mine = torch.tensor([own._nnz() if parameter.grad is not None else -1], device=parameter.device)
    dist.all_gather(counts, mine, group=group)
    entries = [int(count) for count in counts]
    if max(entries) < 0:
        return None
    most = max(entries)
    indices = _gathered(own.indices().t(), most, ranks, group)
    values = _gathered(own.values(), most, ranks, group)
    kept = [slice(0, max(0, count)) for count in entries]
    return torch.sparse_coo_tensor(
        torch.cat([rows[part] for rows, part in zip(indices, kept, strict=True)]).t(),
        torch.cat([rows[part] for rows, part in zip(values, kept, strict=True)]),
        parameter.shape,
    ).coalesce()


def _empty_rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A sparse tensor of the shape of an embedding, without entries."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    dtype = gradient_dtype(parameter)
    values = torch.empty((0, *parameter.shape[1:]), dtype=dtype, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


def _gathered(rows: torch.Tensor, most: int, ranks: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """`rows` of every rank, each filled up to `most`."""
    padded = torch.zeros((most, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(found, padded, group=group)
    return found

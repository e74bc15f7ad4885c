"""Ops whose results have sizes that depend on the data, traced with the sizes that this batch gives them.

`x[mask]`, `nonzero()` and `repeat_interleave(repeats)` make tensors whose sizes tracing cannot know.  If the mask
depends on the inputs alone, the batch is asked how many elements it picks.  If every row has the same number, an op on
rows takes its place, which also fits micro-batches; else the program only fits the whole batch.  The same holds for
`tolist()`.

`masked_scatter` fills the places of a mask with the elements of its source, in order over all rows: what a row gets
depends on the rows before it, unless each row of the mask has as many places as its row of the source has elements.
The batch is asked whether that holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopart.ir.errors import RefusedError

_aten = torch.ops.aten
Ask = Callable[[Any, torch.Tensor, Callable[[torch.Tensor], Any], str], Any]
"""(tracing mode, tensor, what to read of it, name of that) -> answer; None if it depends on more than the inputs."""

BY_ROWS = "by_rows"
"""Argument, in our graph, of a masked_scatter in which each row of the mask takes the elements of its own row."""
MADE_OF_SIZED = frozenset({_aten.repeat_interleave.self_Tensor})
"""Composite ops whose result sizes depend on data and that carry no tag for it."""
_REPEATS = {_aten.repeat_interleave.Tensor: 0, _aten.repeat_interleave.self_Tensor: 1}


_FIXED = "operations with fixed shapes: torch.where, or labels with ignore_index"
SIZE_FIX = (
    "use operations with fixed shapes: torch.where, or a product with the mask, instead of boolean indexing or "
    "nonzero; a loop over experts: each on all tokens, times its routing weight"
)


class Sizes:
    """Sizes in one program that is being traced.  rows: of the traced batch; whole: whether that is the whole batch."""

    def __init__(self, ask: Ask, rows: int | None, where: Callable[[], str], *, whole: bool) -> None:
        self._ask, self._rows, self._where, self._whole = ask, rows, where, whole

    def traced(self, mode: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Trace what replaces an op whose result's size depends on data; return None if the op stays."""
        if func is _aten.index.Tensor:
            return self._index(mode, *args)
        if func is _aten.nonzero.default:
            count = self._ask(mode, args[0], lambda tensor: int(tensor.count_nonzero()), "nonzero")
            if count is None:
                return None
            self._need_whole("nonzero()")
            with mode:
                places: torch.Tensor = _aten.nonzero_static.default(args[0], size=count)
                return places
        if func in _REPEATS and kwargs.get("output_size") is None:
            return self._repeat(mode, func, args, kwargs)
        return None

    def numbers(self, mode: Any, tensor: torch.Tensor) -> Any:
        """Return what `tolist()` gives; None if it depends on more than the inputs.

        If every row of the batch has the same numbers, a micro-batch has them too.
        """
        in_rows = self._rows_of(tensor) if tensor.dim() else 0
        found = self._ask(mode, tensor, partial(_numbers, in_rows=in_rows), "tolist")
        if found is None:
            return None
        kind, numbers = found
        if kind == "of all":
            self._need_whole("tolist()", "other numbers", "keep it a tensor and compute with that")
            return numbers
        return [*numbers] * (tensor.shape[0] // in_rows)

    def _repeat(self, mode: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        repeats = args[_REPEATS[func]]
        if repeats.dim() != 1 or repeats.numel() == 1:
            return None
        total = self._ask(mode, repeats, lambda tensor: int(tensor.sum()), "repeat_interleave")
        if total is None:
            return None
        self._need_whole("repeat_interleave() with a tensor")
        with mode:
            result: torch.Tensor = func(*args, **{**kwargs, "output_size": total})
            return result

    def _index(self, mode: Any, x: torch.Tensor, indices: Any) -> torch.Tensor | None:
        if not indices or any(index is not None for index in indices[1:]):
            return None
        mask = indices[0]
        if mask is None or mask.dtype is not torch.bool or mask.dim() == 0:
            return None
        in_rows = self._rows_of(mask)
        rows = mask.shape[0] // in_rows if in_rows else 1
        found = self._ask(mode, mask, partial(_picked, in_rows=in_rows), "index")
        if found is None:
            return None
        kind, count = found
        if kind == "in all":
            self._need_whole("x[mask]")
        with mode:
            flat = x.flatten(0, mask.dim() - 1) if mask.dim() > 1 else x
            if kind == "in each row":
                return _rows_picked(flat, mask, rows, count)
            places = _aten.nonzero_static.default(mask.reshape(-1), size=count)
            return flat.index_select(0, places.squeeze(1))

    def scatters_by_rows(self, mode: Any, args: Any) -> bool:
        """Return whether a masked_scatter that is about to be traced works row by row in this batch.

        A mask that depends on more than the inputs cannot be asked about.
        """
        if len(args) != 3 or not self._rows:
            return False
        target, mask, source = args
        if target.dim() == 0 or target.shape[0] != self._rows or source.numel() % self._rows:
            return False
        read = partial(_each_row_full, row=tuple(target.shape[1:]), places=source.numel() // self._rows)
        return bool(self._ask(mode, mask, read, "masked_scatter"))

    def _rows_of(self, mask: torch.Tensor) -> int:
        """Return how many entries of a mask's first axis belong to a row of the batch; 0 if it has no rows."""
        return mask.shape[0] // self._rows if self._rows and mask.shape[0] % self._rows == 0 else 0

    def _need_whole(self, what: str, gives: str = "another number of elements", instead: str = _FIXED) -> None:
        if not self._whole:
            raise RefusedError(
                f"{what} gives {gives} for every micro-batch",
                where=self._where(),
                why="the rows of this batch differ in that, and one program has to fit all micro-batches",
                fix=f"use micro_batches=1, or {instead}",
            )


def _numbers(tensor: torch.Tensor, in_rows: int) -> tuple[str, Any]:
    """Return the numbers of each row of the batch if all have the same, else all numbers.  in_rows: as in `_picked`."""
    numbers = tensor.tolist()
    if in_rows and all(numbers[i] == numbers[i % in_rows] for i in range(len(numbers))):
        return "of each row", numbers[:in_rows]
    return "of all", numbers


def _picked(mask: torch.Tensor, in_rows: int) -> tuple[str, int]:
    """Return how many places a mask has: in each row of the batch if all have the same number, else in total.

    in_rows: entries of its first axis that belong to a row; 0 if it has no rows.
    """
    if in_rows:
        counts = mask.reshape(mask.shape[0] // in_rows, -1).sum(1)
        if bool((counts == counts[0]).all()):
            return "in each row", int(counts[0])
    return "in all", int(mask.sum())


def _rows_picked(flat: torch.Tensor, mask: torch.Tensor, rows: int, count: int) -> torch.Tensor:
    """Return `count` elements of each row, in order."""
    length, rest = flat.shape[0] // rows, flat.shape[1:]
    if count == length:
        return flat
    order = mask.reshape(rows, length).logical_not().to(torch.uint8).sort(dim=1, stable=True).indices
    order = order[:, :count].reshape(rows, count, *(1 for _ in rest)).expand(rows, count, *rest)
    return flat.reshape(rows, length, *rest).gather(1, order).reshape(rows * count, *rest)


def _each_row_full(mask: torch.Tensor, row: tuple[int, ...], places: int) -> bool:
    """Return whether each row of a mask, broadcast to rows of this shape, has this number of places."""
    if mask.dim() < len(row) + 1:
        return False
    counts = mask.expand(mask.shape[0], *row).flatten(1).sum(1)
    return bool((counts == places).all())


def is_by_rows(node: fx.Node) -> bool:
    """Return whether an op, or the op that it was made of, was marked as working row by row."""
    return bool((node.meta.get("custom") or {}).get(BY_ROWS))


def is_data_dependent(error: Exception) -> bool:
    """Return whether torch.export stopped because a size or a branch depends on the numbers in a tensor."""
    name = type(error).__name__
    return "data-dependent" in str(error) or "DataDependent" in name or "DynamicOutputShape" in name


def size_fix(model: nn.Module) -> str:
    """Return what the user can do where sizes depend on the numbers in a tensor."""
    return SIZE_FIX + experts_fix(model)


def experts_fix(model: nn.Module) -> str:
    """Return the advice for a model whose implementation of experts can be chosen, as in transformers."""
    supports = getattr(model, "_can_set_experts_implementation", None)
    chosen = callable(getattr(model, "set_experts_implementation", None)) and (not callable(supports) or supports())
    return '; here: call model.set_experts_implementation("grouped_mm")' if chosen else ""

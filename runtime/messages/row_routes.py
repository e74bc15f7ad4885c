"""Which rows of which values of a message this rank exchanges with which rank, if stages have replicas.

A value that holds rows is cut if the shares of two ranks differ, and joined by the receiver.  A value without rows
comes whole from one sender, and its gradients go back to that sender, which adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from autopart.ir.actions import BACKWARD, Action
from autopart.ir.program import Program
from autopart.ir.shares import RowLayout, common_period, passages


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a message that passes between this rank and one other: `count` of this rank's `own` rows, from
    `first` on.  piece: the slice of tokens."""

    peer: int
    names: tuple[str, ...]
    first: int
    count: int
    own: int
    piece: int = 0


class RowRoutes:
    """The parts of the messages of one rank.

    layouts: of the values that hold rows and may be cut, by name, or by (name, slice) if a slice holds rows in another
    way.  A value without a layout passes only between ranks that have the same rows.  orders: axes in memory order of
    the values that do not lie in the order of their axes, the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        layouts: Mapping[str | tuple[str, int], RowLayout],
        orders: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        self._rank, self._orders = rank, orders
        self._program = program
        self._edges = {(edge.src, edge.dst): edge for edge in program.edges}
        self._layouts = layouts
        self._known: dict[tuple[int, int, str, int, int, int], tuple[RowPart, ...]] = {}
        self._of_action: dict[tuple[Action, int], tuple[RowPart, ...]] = {}

    def parts(self, action: Action, rows: int) -> tuple[RowPart, ...]:
        """Return the parts of a message that this rank sends or receives, for a micro-batch of `rows` rows; nothing if
        this rank has no rows."""
        known = self._of_action.get((action, rows))
        if known is not None:
            return known
        assert action.peer is not None
        phase = action.micro % common_period(self._program.division(action.stage), self._program.division(action.peer))
        key = action.stage, action.peer, action.is_a.way, phase, rows, action.slot.slice
        if key not in self._known:
            self._known[key] = tuple(self._parts(*key))
        return self._of_action.setdefault((action, rows), self._known[key])

    def _parts(self, stage: int, peer: int, way: str, micro: int, rows: int, piece: int) -> Iterable[RowPart]:
        program = self._program
        src, dst = min(stage, peer), max(stage, peer)
        windows = {each: program.division(each).windows(micro, rows) for each in (src, dst)}
        mine = windows[stage][program.stage_ranks[stage].index(self._rank)]
        shards, ranks = program.division(src).shards, program.stage_ranks
        for passage in passages(windows[src], ranks[src], windows[dst], ranks[dst], shards):
            own, other = (passage.src, passage.dst) if stage == src else (passage.dst, passage.src)
            if own != self._rank:
                continue
            names = self._edges[src, dst].names(way, piece)
            if not passage.all_rows and not passage.carries_whole:
                names = tuple(name for name in names if name in self._layouts)
            if names:
                yield RowPart(other, names, passage.first - mine.first, passage.end - passage.first, mine.own, piece)

    def _layout(self, name: str, part: RowPart) -> RowLayout | None:
        return self._layouts.get((name, part.piece), self._layouts.get(name))

    def specs(self, part: RowPart, own: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return shapes, dtypes and memory orders of a part, the same on both ranks.  own: of this rank's rows."""
        return tuple(self._spec(name, part, own[name]) for name in part.names)

    def _spec(self, name: str, part: RowPart, spec: torch.Tensor) -> torch.Tensor:
        layout = self._layout(name, part)
        if layout is None or part.count == part.own:
            return spec
        shape = list(spec.shape)
        shape[layout.axis] = shape[layout.axis] // part.own * part.count
        order = self._orders.get(name, tuple(range(spec.dim())))  # strides do not show it where an axis has one entry
        return torch.empty_permuted(shape, order, dtype=spec.dtype, device="meta")

    def cut(self, part: RowPart, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors to send, as views of this rank's tensors."""
        return [self._rows(name, part, tensors[name]) for name in part.names]

    def _rows(self, name: str, part: RowPart, tensor: torch.Tensor) -> torch.Tensor:
        layout = self._layout(name, part)
        if layout is None or part.count == part.own:
            return tensor
        return rows_of(tensor, layout, part.own, part.first, part.count)

    def joined(
        self,
        way: str,
        parts: Sequence[RowPart],
        found: Sequence[Sequence[torch.Tensor]],
        own: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Join the parts of a message.  own: shapes and dtypes of this rank's rows."""
        if len(parts) == 1 and parts[0].count == parts[0].own:
            return dict(zip(parts[0].names, found[0], strict=True))
        result: dict[str, torch.Tensor] = {}
        for part, tensors in zip(parts, found, strict=True):
            for name, tensor in zip(part.names, tensors, strict=True):
                layout = self._layout(name, part)
                if layout is None:
                    result[name] = result[name] + tensor if way == BACKWARD and name in result else tensor
                    continue
                if name not in result:
                    result[name] = torch.empty_like(own[name], device=tensor.device)
                target = rows_view(result[name], layout, part.own, part.first, part.count)
                target.copy_(rows_view(tensor, layout, part.count, 0, part.count))
        return result


def rows_view(tensor: torch.Tensor, layout: RowLayout, own: int, first: int, count: int) -> torch.Tensor:
    """Return a view of some of its `own` rows, with the axis of rows split into (stride, rows, block)."""
    return torch.unflatten(tensor, layout.axis, (layout.stride, own, -1)).narrow(layout.axis + 1, first, count)


def rows_of(tensor: torch.Tensor, layout: RowLayout, own: int, first: int, count: int) -> torch.Tensor:
    """Return some of the `own` rows of a tensor, in the same form; a view if the strides allow it."""
    return rows_view(tensor, layout, own, first, count).flatten(layout.axis, layout.axis + 2)

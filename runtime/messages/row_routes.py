"""Which rows of which values of a message this rank exchanges with whom, where stages have replicas.

A value that holds rows is cut where the shares of two ranks differ, and put together where it arrives; one without rows
comes whole from one sender, and its gradient goes back to that one, summed over all that took it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.ir.program import BACKWARD, Action, Program
from autopart.ir.shares import RowLayout, common_period, passages
from autopart.runtime.messages.transport import Spec


@dataclass(frozen=True, slots=True)
class Part:
    """What of a message passes between this rank and one other: `count` of this rank's `own` rows, from `first` on.
    piece: of which slice, where sequences are cut."""

    peer: int
    names: tuple[str, ...]
    first: int
    count: int
    own: int
    piece: int = 0


class RowRoutes:
    """The parts of the messages of one rank.

    layouts: of the values that hold rows, as far as they have to be cut; a value of which nothing is known passes only
    between ranks that have the same rows.  (value, slice): of those of which a slice holds them otherwise.
    """

    def __init__(self, rank: int, program: Program, layouts: Mapping[str | tuple[str, int], RowLayout]) -> None:
        self._rank = rank
        self._program = program
        self._edges = {(edge.src, edge.dst): edge for edge in program.edges}
        self._layouts = layouts
        self._known: dict[tuple[int, int, str, int, int, int], tuple[Part, ...]] = {}
        self._of_action: dict[tuple[Action, int], tuple[Part, ...]] = {}

    def parts(self, action: Action, rows: int) -> tuple[Part, ...]:
        """With whom this rank exchanges what in a message that it sends or receives, of a micro-batch of `rows` rows;
        nobody where it has no rows."""
        known = self._of_action.get((action, rows))
        if known is not None:
            return known
        assert action.peer is not None
        phase = action.micro % common_period(self._program.division(action.stage), self._program.division(action.peer))
        key = action.stage, action.peer, action.is_a.way, phase, rows, action.slot.slice
        if key not in self._known:
            self._known[key] = tuple(self._parts(*key))
        return self._of_action.setdefault((action, rows), self._known[key])

    def _parts(self, stage: int, peer: int, way: str, micro: int, rows: int, piece: int) -> Iterable[Part]:
        program = self._program
        src, dst = min(stage, peer), max(stage, peer)
        windows = {each: program.division(each).windows(micro, rows) for each in (src, dst)}
        mine = windows[stage][program.stage_ranks[stage].index(self._rank)]
        for passage in passages(windows[src], program.stage_ranks[src], windows[dst], program.stage_ranks[dst]):
            own, other = (passage.src, passage.dst) if stage == src else (passage.dst, passage.src)
            if own != self._rank:
                continue
            names = self._edges[src, dst].names(way, piece)
            if not passage.all_rows and not passage.carries_whole:
                names = tuple(name for name in names if name in self._layouts)
            if names:
                yield Part(other, names, passage.first - mine.first, passage.end - passage.first, mine.own, piece)

    def _layout(self, name: str, part: Part) -> RowLayout | None:
        return self._layouts.get((name, part.piece), self._layouts.get(name))

    def specs(self, part: Part, own: Mapping[str, Spec]) -> tuple[Spec, ...]:
        """Shapes of what passes.  own: those of this rank's rows."""
        return tuple(self._spec(name, part, own[name]) for name in part.names)

    def _spec(self, name: str, part: Part, spec: Spec) -> Spec:
        layout = self._layout(name, part)
        if layout is None or part.count == part.own:
            return spec
        shape = list(spec.shape)
        shape[layout.axis] = shape[layout.axis] // part.own * part.count
        return Spec(tuple(shape), spec.dtype)

    def cut(self, part: Part, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What is sent: views of this rank's tensors."""
        return [self._rows(name, part, tensors[name]) for name in part.names]

    def _rows(self, name: str, part: Part, tensor: torch.Tensor) -> torch.Tensor:
        layout = self._layout(name, part)
        if layout is None or part.count == part.own:
            return tensor
        return rows_of(tensor, layout, part.own, part.first, part.count)

    def joined(
        self, way: str, parts: Sequence[Part], found: Sequence[Sequence[torch.Tensor]], own: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        """The tensors of a message from its parts.  own: shapes of this rank's rows."""
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
                    result[name] = torch.empty(own[name].shape, dtype=own[name].dtype, device=tensor.device)
                target = rows_view(result[name], layout, part.own, part.first, part.count)
                target.copy_(rows_view(tensor, layout, part.count, 0, part.count))
        return result


def rows_view(tensor: torch.Tensor, layout: RowLayout, own: int, first: int, count: int) -> torch.Tensor:
    """A view of some of its `own` rows, with the axis of the rows taken apart into (stride, rows, block)."""
    return torch.unflatten(tensor, layout.axis, (layout.stride, own, -1)).narrow(layout.axis + 1, first, count)


def rows_of(tensor: torch.Tensor, layout: RowLayout, own: int, first: int, count: int) -> torch.Tensor:
    """Some of the rows of a tensor that holds `own`, in its own form; a view where the strides allow it."""
    return rows_view(tensor, layout, own, first, count).flatten(layout.axis, layout.axis + 2)

"""What a rank runs for batches of one kind: the code of its stages and the shapes of all values, by number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import nn

from autopart.capture import Captured
from autopart.capture.derive.reduction import Layouts
from autopart.ir.graph import Adjusted
from autopart.ir.plan import Stage
from autopart.ir.program import Edge
from autopart.passes.tokens.recipe import Recipe, Slice
from autopart.runtime.stages.batch_statistics import share_statistics
from autopart.runtime.stages.stage_module import StageSlices
from autopart.runtime.tensors import LocalTensors
from autopart.session.code.random_rows import draws_of
from autopart.session.code.slice_needs import Extras
from autopart.session.code.split import casts_of, leaving, stage_module, wait_for
from autopart.session.code.token_slices import slice_stage


class StageCode:
    """The code of a rank's stages, by stage and rows.  Engine and stage runners are given the dictionaries once, which
    are filled later."""

    def __init__(
        self,
        tensors: LocalTensors,
        device: torch.device,
        awaited: Collection[str] = (),
        statistics: Mapping[int, nn.Module] = MappingProxyType({}),
    ) -> None:
        """awaited: parameters whose values may still be on their way when the code begins.  statistics: by stage, the
        batch norms that replace those of its code."""
        self._tensors = tensors
        self._device = device
        self._awaited = awaited
        self._statistics = statistics
        self.modules: dict[int, dict[int, StageSlices]] = defaultdict(dict)
        self.specs: dict[int | tuple[int, int], Mapping[str, torch.Tensor]] = {}

    def has(self, rows: int, stages: Collection[int]) -> bool:
        """Whether shapes, and the code of these stages, are made for micro-batches of so many rows."""
        return rows in self.specs and all(rows in self.modules[s] for s in stages)

    def add_specs(self, captured: Captured) -> None:
        """Note shapes and dtypes of all values at the rows of `captured`."""
        self.specs[captured.graph.rows] = {
            value.name: _on_meta(value.shape, value.dtype) for value in captured.graph.values
        }

    def add_slice_specs(self, captured: Captured, recipe: Recipe, lengths: Sequence[int]) -> None:
        """Note the shapes of all values in every slice; values without tokens keep their shape."""
        ends = list(accumulate(lengths, initial=0))
        for number, (start, end) in enumerate(pairwise(ends)):
            part = Slice(start, end, recipe.tokens)
            self.specs[captured.graph.rows, number] = {
                value.name: _on_meta(recipe.form(value.name).shape(value.shape, part), value.dtype)
                for value in captured.graph.values
            }

    def add_sliced(
        self,
        captured: Captured,
        recipe: Recipe,
        lengths: Sequence[int],
        links: Sequence[Edge],
        stage: int,
        planned: Stage,
        adjusted: Sequence[Adjusted],
        layouts: Layouts,
    ) -> None:
        """Cut the stage out of `captured` once for each slice, and hold the tensors that it uses."""
        graph, chosen = captured.graph, set(planned.ops)
        outputs = leaving(graph, links, stage, chosen)
        drawn = draws_of(captured, chosen, layouts) if planned.division.splits else {}
        extras = Extras(casts_of(graph, chosen, outputs), planned.recompute, adjusted, drawn)
        made = slice_stage(captured, recipe, chosen, outputs, lengths, self._device, extras)
        prologue, slices = made
        codes = [*slices, prologue] if prologue is not None else slices
        self._tensors.hold(tuple(dict.fromkeys(name for code in codes for name in code.held)), captured.tensors)
        for code in codes:
            wait_for(code, self._awaited)
        self.modules[stage][graph.rows] = made

    def add_stage(
        self,
        captured: Captured,
        links: Sequence[Edge],
        stage: int,
        planned: Stage,
        adjusted: Sequence[Adjusted],
        layouts: Layouts,
    ) -> None:
        """Cut the stage out of `captured` and hold the tensors that it uses."""
        module = stage_module(captured, links, stage, planned, self._device, adjusted, layouts)
        self._tensors.hold(module.held, captured.tensors)
        wait_for(module, self._awaited)
        if stage in self._statistics:
            share_statistics(module.module, self._statistics[stage])
        self.modules[stage][captured.graph.rows] = None, (module,)


def _on_meta(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

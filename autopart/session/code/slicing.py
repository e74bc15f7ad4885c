"""Sequences that are cut: the recipe, the code of every slice, and a check of the masks of each batch, which may hide
from a token everything that it could look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch.batch import Batch
from autopart.capture.derive.reduction import Layouts
from autopart.capture.derive.token_axis import token_recipe
from autopart.ir.errors import BatchError, RefusedError
from autopart.ir.graph import Adjusted, Graph
from autopart.ir.plan import Decision
from autopart.ir.shares import RowLayout
from autopart.ir.size import Size
from autopart.passes.program.routing import edges
from autopart.passes.tokens.recipe import Recipe, Slice
from autopart.runtime.stages.slice_module import KeysSeen
from autopart.runtime.stages.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.session.code.split import cut
from autopart.session.code.stage_code import StageCode
from autopart.session.code.token_slices import behind, keys_seen
from autopart.session.step.parts import inputs_of


class TokenSlicing:
    """The slices of a decision, for batches of one kind.

    active: whether there are any.  prologue: ops that every stage runs for itself, at full length; known once code was
    made.  layouts: how slices of values hold rows, where that is not as the whole values do.
    """

    def __init__(self, captures: CaptureCache, decision: Decision, tensors: LocalTensors, device: torch.device) -> None:
        self._captures, self._decision, self._tensors, self._device = captures, decision, tensors, device
        self._tokens = 0
        self.layouts: dict[str | tuple[str, int], RowLayout] = {}
        self._guards: dict[int, list[tuple[KeysSeen, StageModule | None]]] = {}
        self._proved_by: dict[str, torch.Tensor] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self.active = bool(decision.token_slices)
        self.prologue: frozenset[str] = frozenset()

    def add(
        self,
        code: StageCode,
        captured: Captured,
        batch: Batch,
        stages: Sequence[int],
        adjusted: Sequence[Adjusted],
        layouts: Layouts,
    ) -> None:
        """Make the code of these stages for the rows of `captured`, and note what messages hold.

        Raises RefusedError where the model cannot be cut and as `draws_of`, UsageError for sequences of another length.
        """
        rows = captured.graph.rows
        recipe = self._recipe(batch, rows)
        self._tokens, self.prologue = recipe.tokens, recipe.prologue
        lengths = self._decision.token_slices
        for name in recipe.constants - self._proved_by.keys():
            self._proved_by[name] = captured.tensors[name].detach().cpu().clone()
        code.add_slice_specs(captured, recipe, lengths)
        self.layouts.update(sliced_layouts(captured.graph, recipe, lengths, layouts))
        links = edges(self._decision, captured.graph, self.prologue)
        for stage in stages:
            planned = self._decision.stages[stage]
            code.add_sliced(captured, recipe, lengths, links, stage, planned, adjusted, layouts)
        if 0 in stages:
            dtypes = {value.name: value.dtype for value in captured.graph.values}
            guards = [keys_seen(guard, dtypes) for guard in recipe.guards]
            self._guards[rows] = [(guard, self._code_of(captured, recipe, guard.values)) for guard in guards]

    def _recipe(self, batch: Batch, rows: int) -> Recipe:
        recipe = token_recipe(self._captures, batch, Size(rows))
        if isinstance(recipe, RefusedError):
            raise recipe
        return recipe

    def prologue_of(self, batch: Batch) -> frozenset[str]:
        """The prologue for a batch, before code is made; empty where sequences are whole.  Raises RefusedError."""
        return self._recipe(batch, max(self._decision.micro_rows)).prologue if self.active else frozenset()

    def _code_of(self, captured: Captured, recipe: Recipe, values: Iterable[str]) -> StageModule | None:
        """What computes these masks, but for those that are inputs or held."""
        self._tensors.hold([name for name in values if name in captured.tensors], captured.tensors)
        there = {*captured.graph.inputs, *captured.tensors}
        masks = [name for name in dict.fromkeys(values) if name not in there]
        if not masks:
            return None
        code = cut(captured, behind(captured, recipe, masks), masks, self._device)
        self._tensors.hold(code.held, captured.tensors)
        return code

    def check_constants(self) -> None:
        """Check that buffers whose numbers prove that no token looks at a later one still hold these numbers.

        Raises RefusedError.  O(buffers); O(elements) of those that were written to.
        """
        for name, before in self._proved_by.items():
            held = self._tensors.held.get(name)
            if held is None or self._versions.get(name) == (id(held), held._version):
                continue
            if not torch.equal(held.detach().cpu(), before):
                raise RefusedError(
                    "a buffer was changed from which it was proven that no token looks at a later one",
                    where=name,
                    why="sequences are cut into slices because of what it held when the model was compiled",
                    fix="compile again with it, or leave token_slices out",
                )
            self._versions[name] = id(held), held._version

    def check(self, batch: Batch, names: Sequence[str]) -> None:
        """Check that attention in this batch is causal and that no query is left without a visible key.  names: of the
        inputs.

        Looked at in parts of as many rows as there is code for, of which the last two may overlap.
        Raises BatchError: the whole sequence would have such a query look at later keys too.
        """
        rows = 1 if batch.rows is None else batch.rows
        own = max((size for size, guards in self._guards.items() if guards and size <= rows), default=0)
        if not own:
            return
        count, rest = divmod(rows, own)
        cuts = [((own,) * count + (rest,) * (rest > 0), range(count)), ((rows - own, own), [1] if rest else [])]
        for sizes, wanted in cuts:
            for inputs in inputs_of(batch, names, sizes, self._device, wanted).values() if wanted else ():
                self._look(own, inputs)

    def _look(self, rows: int, inputs: Mapping[str, torch.Tensor]) -> None:
        for guard, code in self._guards[rows]:
            values = dict(inputs)
            values.update((n, self._tensors.held[n]) for n in guard.values if n in self._tensors.held)
            if code is not None:
                with torch.no_grad():
                    made = code.module(*code.arguments(self._tensors.held), *(values[n] for n in code.inputs))
                values.update(zip(code.outputs, made, strict=True))
            if not guard.holds(values, self._tokens):
                raise BatchError(
                    "in this batch some token may look at no token that is not after it, or at a later one",
                    where=f"the masks of {guard.op}",
                    why="attention that sees nothing spreads over all tokens alike, later ones too; and a large "
                    "number that is added to a finite mask undoes it",
                    fix="pad sequences at their end, or leave token_slices out",
                )


def sliced_layouts(
    graph: Graph, recipe: Recipe, lengths: Sequence[int], layouts: Layouts
) -> dict[str | tuple[str, int], RowLayout]:
    """How slices hold the rows of these values, by (value, slice), where the tokens stand before the rows on one axis:
    there a slice has fewer entries before each row than the whole has."""
    found: dict[str | tuple[str, int], RowLayout] = {}
    shapes = {value.name: value.shape for value in graph.values}
    parts = [Slice(start, end, recipe.tokens) for start, end in pairwise(accumulate(lengths, initial=0))]
    for name, layout in layouts.items():
        form = recipe.form(name)
        if layout is None or not any(
            held.axis == layout.axis and held.stride < layout.stride for _, held in form.roles()
        ):
            continue
        for number, part in enumerate(parts):
            whole, own = shapes[name][layout.axis], form.shape(shapes[name], part)[layout.axis]
            found[name, number] = RowLayout(layout.axis, layout.stride * own // whole)
    return found

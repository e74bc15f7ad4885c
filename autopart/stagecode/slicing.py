"""Checks, before every step, that no token looks at a later one: of buffers, and of the masks of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from autopart.batch.batch import Batch
from autopart.capture import Captured
from autopart.capture.trace.to_graph import dtype_name
from autopart.ir.errors import BatchError, RefusedError
from autopart.passes.tokens.recipe import FALSE, NEGATIVE, MaskGuard, QueryKeyAxes, Recipe
from autopart.passes.tokens.scores import hiding_limit
from autopart.runtime.stages.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.stagecode.split import ancestors, cut


class SliceChecks:
    """Checks of the buffers and masks from which causality was proven, for batches of one kind."""

    def __init__(self, tensors: LocalTensors, device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._tokens = 0
        self._guards: dict[int, list[tuple[MaskGuard, StageModule | None]]] = {}
        self._proved_by: dict[str, torch.Tensor] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._copied: dict[str, tuple[torch.Tensor, int]] = {}

    def add(self, captured: Captured, recipe: Recipe, *, masks: bool) -> None:
        """Note the buffers of a recipe, and if `masks` make the code of its masks for the rows of `captured`."""
        self._tokens = recipe.tokens
        for name in recipe.constants - self._proved_by.keys():
            self._proved_by[name] = captured.tensors[name].detach().cpu().clone()
            if captured.names.kinds[name] == "constant":
                self._constants[name] = captured.tensors[name]
        if masks:
            self._guards[captured.graph.rows] = [
                (guard, self._code_of(captured, recipe, _read_by(guard))) for guard in recipe.guards
            ]

    def note_copies(self, captured: Captured) -> None:
        """Note the constants that code for another device has copies of."""
        here = torch.empty(0, device=self._device).device
        for name in (name for name, kind in captured.names.kinds.items() if kind == "constant"):
            tensor = captured.tensors[name]
            if tensor.device != here:
                self._copied.setdefault(name, (tensor, tensor._version))

    def _code_of(self, captured: Captured, recipe: Recipe, values: Iterable[str]) -> StageModule | None:
        """Return the code of these masks, None if all are inputs or tensors."""
        self._tensors.hold([name for name in values if name in captured.tensors], captured.tensors)
        there = {*captured.graph.inputs, *captured.tensors}
        masks = [name for name in dict.fromkeys(values) if name not in there]
        if not masks:
            return None
        code = cut(captured, ancestors(captured.graph, masks, among=recipe.prologue), masks, self._device)
        self._tensors.hold(code.held, captured.tensors)
        return code

    def check_constants(self) -> None:
        """Check that buffers and constants that prove that no token looks at a later one still hold their numbers, and
        that nobody wrote to what was copied to the device.

        Raises RefusedError.  O(tensors); O(elements) of those that were written to.
        """
        for name, (tensor, version) in self._copied.items():
            if tensor._version != version:
                raise RefusedError(
                    "a tensor that is neither a parameter nor a buffer was written to in place",
                    where=name,
                    why=f"it lies on {tensor.device}, and the pipeline computes with a copy on {self._device}",
                    fix="assign another tensor to the attribute, or make it a buffer (register_buffer)",
                )
        for name, before in self._proved_by.items():
            held = self._constants.get(name, self._tensors.held.get(name))
            seen, version = self._seen.get(name, (None, 0))
            if held is None or (seen is held and version == held._version):
                continue
            if not torch.equal(held.detach().cpu(), before):
                raise RefusedError(
                    "a tensor was changed on which the proof rests that no token sees a later one",
                    where=name,
                    why="sequences are cut into slices because of its values when the model was compiled",
                    fix="compile again with it, or leave token_slices out",
                )
            self._seen[name] = held, held._version

    def check_masks(self, batch: Batch, names: Sequence[str]) -> None:
        """Check that attention in this batch is causal and that no query is left without a visible key.  names: of the
        inputs.

        The batch is checked in parts of the size that there is code for; the last part may overlap the one before.
        Raises BatchError: over the whole sequence such a query would look at later keys too.
        """
        rows = 1 if batch.rows is None else batch.rows
        own = max((size for size, guards in self._guards.items() if guards and size <= rows), default=0)
        if not own:
            return
        count, rest = divmod(rows, own)
        parts = batch.micro((own,) * count + (rest,) * (rest > 0))[:count]
        if rest:
            parts.append(batch.micro((rows - own, own))[1])
        for tensors in parts:
            self._check(own, {name: t.to(self._device) for name, t in zip(names, tensors, strict=True)})

    def _check(self, rows: int, inputs: Mapping[str, torch.Tensor]) -> None:
        for guard, code in self._guards[rows]:
            values = dict(inputs)
            values.update((n, self._tensors.held[n]) for n in _read_by(guard) if n in self._tensors.held)
            if code is not None:
                with torch.no_grad():
                    made = code.module(*code.arguments(self._tensors.held), *(values[n] for n in code.inputs))
                values.update(zip(code.outputs, made, strict=True))
            if not every_query_sees(guard, values, self._tokens):
                raise BatchError(
                    "in this batch a token may see no token up to itself, or a later one",
                    where=f"the masks of {guard.op}",
                    why="attention that sees nothing spreads over all tokens alike, later ones too; and a large "
                    "number that is added to a finite mask undoes it",
                    fix="pad sequences at their end, or leave token_slices out",
                )


def _read_by(guard: MaskGuard) -> tuple[str, ...]:
    """Return the names of the masks, and of what else is added to the scores."""
    return tuple(dict.fromkeys([at.value for at, _ in guard.masks] + [at.value for at, *_ in guard.lifts]))


def every_query_sees(guard: MaskGuard, values: Mapping[str, torch.Tensor], tokens: int) -> bool:
    """Check that every query sees a key that is not after it, through all masks together.

    values: the masks and what else is added to the scores, by name.  O(elements of the masks).
    """
    seen: torch.Tensor | None = None
    for at, hides in guard.masks:
        value = values[at.value]
        limit = hiding_limit(dtype_name(value.dtype))
        visible = _queries_and_keys_last(value > limit if hides == NEGATIVE else (value != 0) == (hides == FALSE), at)
        if hides == NEGATIVE and bool((visible & ~_not_later(visible, tokens)).any()):
            return False
        seen = visible if seen is None else seen & visible
    assert seen is not None
    for at, factor, most, least in guard.lifts:
        added = values[at.value] * factor
        if bool((added > most).any()):
            return False
        if least > -math.inf:
            seen = seen & _queries_and_keys_last(added > least, at)
    return bool((seen & _not_later(seen, tokens)).any(-1).all())


def _queries_and_keys_last(found: torch.Tensor, at: QueryKeyAxes) -> torch.Tensor:
    """Move the axes of queries and keys to the end; a missing one becomes an axis of size 1."""
    axes = [axis for axis in at[1:] if axis is not None]
    found = found.movedim(axes, list(range(-len(axes), 0)))
    found = found.unsqueeze(-1) if at.keys is None else found
    return found.unsqueeze(-2) if at.queries is None else found


def _not_later(cells: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return where the key is not after the query.  cells: (..., queries, keys), of size 1 for all tokens alike."""
    queries, keys = (size if size > 1 else tokens for size in cells.shape[-2:])
    return torch.ones(queries, keys, dtype=torch.bool, device=cells.device).tril()

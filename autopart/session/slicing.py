"""What an executor has to do where sequences are cut: find the recipe, make the code of every slice, and look at the
masks of each batch, which may hide from a token everything that it could look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from autopart.capture import CaptureCache, Captured
from autopart.capture.batch import Batch
from autopart.capture.token_axis import token_recipe
from autopart.ir.errors import BatchError, RefusedError, TokenRefusal
from autopart.ir.plan import Decision
from autopart.ir.program import Program
from autopart.ir.size import Size
from autopart.passes.tokens.recipe import Recipe
from autopart.runtime.slice_module import KeysSeen
from autopart.runtime.stage_module import StageModule
from autopart.runtime.tensors import LocalTensors
from autopart.session.split import cut
from autopart.session.stage_code import StageCode
from autopart.session.token_slices import behind, keys_seen

_WHOLE = "leave token_slices out: the model is then trained on whole sequences"


class TokenSlicing:
    """The slices of a decision, for batches of one signature at a time.

    active: whether there are any.  prologue: ops that every stage runs for itself, at full length; known once code was
    made.
    """

    def __init__(self, captures: CaptureCache, decision: Decision, tensors: LocalTensors, device: torch.device) -> None:
        self._captures, self._decision, self._tensors, self._device = captures, decision, tensors, device
        self._recipes: dict[int, Recipe] = {}
        self._guards: dict[int, list[tuple[KeysSeen, StageModule | None]]] = {}
        self.active = bool(decision.token_slices)
        self.prologue: frozenset[str] = frozenset()

    def add(
        self,
        code: StageCode,
        captured: Captured,
        batch: Batch,
        program: Callable[[int], Program],
        stage: int | None,
        adjusted: Collection[object],
    ) -> None:
        """Make the code of `stage` for the rows of `captured`, and note what messages hold.

        Raises TokenRefusal where the model cannot be cut, RefusedError for losses that are sums of terms with other
        weights, UsageError for sequences of another length.
        """
        if adjusted:
            raise RefusedError(
                "the terms of this loss have weights of their own, which are not counted slice by slice", fix=_WHOLE
            )
        if any(len(one.ranks) > 1 for one in self._decision.stages) and any(op.random for op in captured.graph.ops):
            raise RefusedError("random numbers are not drawn alike by replicas where sequences are cut", fix=_WHOLE)
        rows = captured.graph.rows
        recipe = token_recipe(self._captures, batch, Size(rows))
        if isinstance(recipe, TokenRefusal):
            raise recipe
        self._recipes[rows], self.prologue = recipe, recipe.prologue
        code.add_slice_specs(captured, recipe, self._decision.token_slices)
        if stage is not None:
            planned = self._decision.stages[stage]
            code.add_sliced(captured, recipe, program(1), stage, planned, self._decision.token_slices)
        if stage == 0:
            dtypes = {value.name: value.dtype for value in captured.graph.values}
            guards = [keys_seen(guard, dtypes) for guard in recipe.guards]
            self._guards[rows] = [(guard, self._code_of(captured, recipe, guard.values)) for guard in guards]

    def _code_of(self, captured: Captured, recipe: Recipe, values: Iterable[str]) -> StageModule | None:
        """What computes these masks, but for those that are inputs."""
        masks = [name for name in dict.fromkeys(values) if name not in captured.graph.inputs]
        if not masks:
            return None
        code = cut(captured, behind(captured, recipe, masks), masks, self._device)
        self._tensors.hold(code.held, captured.tensors)
        return code

    def check(self, rows: Iterable[int], micros: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Of the parts of a batch, each of so many rows, that every query sees a key that is not after it.

        Raises BatchError: the whole sequence would have such a query look at all keys alike, later ones too.
        """
        for own, inputs in zip(rows, micros, strict=True) if self._guards else ():
            for guard, code in self._guards.get(own, ()):
                values = dict(inputs)
                if code is not None:
                    with torch.no_grad():
                        made = code.module(*code.arguments(self._tensors.held), *(values[n] for n in code.inputs))
                    values.update(zip(code.outputs, made, strict=True))
                if not guard.holds(values, self._recipes[own].tokens):
                    raise BatchError(
                        "in this batch some token may look at no token that is not after it",
                        where=f"the masks of {guard.op}",
                        why="attention then spreads over all tokens alike, also those of later slices",
                        fix="pad sequences at their end, or leave token_slices out",
                    )

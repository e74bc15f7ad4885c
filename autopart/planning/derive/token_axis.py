"""Whether a captured model can run token slice by token slice.

This takes a second capture of shorter sequences, and numbers of the model's constants for the proof that masks are
causal (`passes.tokens`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import fx

from autopart.batch.batch import Batch
from autopart.capture.capture import Captured
from autopart.capture.python.reads.masks import with_masks
from autopart.capture.python.reads.questions import made_of
from autopart.ir.errors import CaptureError, RefusedError, UsageError
from autopart.ir.graph import Size
from autopart.passes.tokens.analysis import analyse
from autopart.passes.tokens.recipe import Form, Recipe, TokenLayout
from autopart.planning.derive.family import Captures

_FIX = "leave token_slices out: the model is then trained on whole sequences"


def token_recipe(captures: Captures, batch: Batch, size: Size) -> Recipe | RefusedError:
    """Return how the model runs token slice by token slice, or why it cannot.

    Costs a capture of shorter sequences.  Raises CaptureError, RefusedError.
    """
    captured = captures(batch, size)
    tokens = sequence_length(batch)
    if tokens is None or tokens < 4:
        return RefusedError(
            "the batch has no sequences to cut",
            why="tokens lie along axis 1 of inputs of integers, (rows, tokens), of 4 tokens at least",
            fix=_FIX,
        )
    fewer = fewer_tokens(tokens)
    try:
        # The parts of masks that shorter sequences have may hide nothing: they are taken as in the whole ones.
        shorter = _shorter(captures, with_masks(batch, captured.masks), size, tokens, fewer)
    except (CaptureError, RefusedError) as error:
        return RefusedError(
            f"the model cannot be captured with sequences of {fewer} tokens",
            where=error.where,
            why=f"{error.what}" + (f": {error.why}" if error.why else ""),
            fix=_FIX,
        )
    numbers = Probed(captured)
    recipe = analyse(captured.graph, shorter.graph, tokens, fewer, numbers)
    return replace(recipe, constants=frozenset(numbers.read)) if isinstance(recipe, Recipe) else recipe


@dataclass(frozen=True, slots=True)
class AskedSlices:
    """Token slices for the planner.

    token_slices: lengths, () for whole sequences, or "auto"; recipe: how the model is cut; notes: for the plan.
    """

    token_slices: tuple[int, ...] | str = ()
    recipe: Recipe | None = None
    notes: tuple[str, ...] = ()

    @property
    def once(self) -> frozenset[str]:
        """Ops that every stage runs itself, at full length."""
        return self.recipe.prologue if self.recipe is not None else frozenset()


WHOLE_SEQUENCES = AskedSlices()


def asked_slices(
    asked: str | int | tuple[int, ...] | None, captures: Captures, batch: Batch, size: Size
) -> AskedSlices:
    """Return the slices that `token_slices=` asks for.

    Raises RefusedError if the model cannot be sliced, UsageError for lengths whose sum is not the sequence length.
    "auto" gives whole sequences and a note for a model that cannot be sliced.
    """
    if asked is None or asked == 1:
        return WHOLE_SEQUENCES
    recipe = token_recipe(captures, batch, size)
    if isinstance(recipe, RefusedError):
        if asked != "auto":
            raise recipe
        where = f" ({recipe.where})" if recipe.where else ""
        return AskedSlices(notes=(f"sequences are whole: {recipe.what}{where}",))
    if isinstance(asked, str):
        return AskedSlices("auto", recipe)
    tokens = recipe.tokens
    if isinstance(asked, int):
        ends = [tokens * i // asked for i in range(asked + 1)]
        lengths = tuple(b - a for a, b in pairwise(ends))
    else:
        lengths = asked
    if sum(lengths) != tokens or min(lengths) < 1:
        raise UsageError(
            f"token_slices={asked} does not make up sequences of {tokens} tokens",
            fix=f"use at most {tokens} slices, or lengths of at least one token whose sum is {tokens}",
        )
    return AskedSlices(lengths if len(lengths) > 1 else (), recipe)


def sliced_at(slices: AskedSlices, captures: Captures, batch: Batch, size: Size) -> AskedSlices:
    """Return slices whose recipe says where rows and tokens lie at another number of rows.  Raises RefusedError."""
    if slices.recipe is None:
        return slices
    recipe = token_recipe(captures, batch, size)
    if isinstance(recipe, RefusedError):
        raise recipe
    return replace(slices, recipe=recipe)


def sequence_length(batch: Batch) -> int | None:
    """Return the tokens of a batch's sequences: the most common size of axis 1 of its integer inputs."""
    sizes = Counter(
        tensor.shape[1]
        for tensor, split in batch.tensors_and_splits()
        if split and tensor.dim() == 2 and not tensor.is_floating_point()
    )
    return sizes.most_common(1)[0][0] if sizes else None


def fewer_tokens(tokens: int) -> int:
    """Return the sequence length of the second capture."""
    return tokens - 3 if tokens > 6 else tokens - 1


def _shorter(captures: Captures, batch: Batch, size: Size, tokens: int, fewer: int) -> Captured:
    """Capture shorter sequences; feature axes that happen to have the size of a sequence stay whole."""
    try:
        return captures(shortened(batch, tokens, fewer), size)
    except (CaptureError, RefusedError):
        if not any(tensor.shape[1:].count(tokens) > 1 for tensor, split in batch.tensors_and_splits() if split):
            raise
        return captures(shortened(batch, tokens, fewer, once=True), size)


def shortened(batch: Batch, tokens: int, fewer: int, *, once: bool = False) -> Batch:
    """Return the first `fewer` tokens of each sequence, along every axis of size `tokens`.

    once: in floating point tensors only along the first such axis.
    """

    def cut(tensor: torch.Tensor, split: bool) -> torch.Tensor:
        axes = [axis for axis in range(1 if split else 0, tensor.dim()) if tensor.shape[axis] == tokens]
        for axis in axes[:1] if once and tensor.is_floating_point() else axes:
            tensor = tensor.narrow(axis, 0, fewer)
        return tensor.clone()

    return batch.changed(cut, batch.rows)


_HALF_DECADES = [10 ** (half / 2) for half in range(-12, 9)]
_SIZES = tuple({*((1.0, steep) for steep in _HALF_DECADES), *((size, 1.0) for size in _HALF_DECADES)})
"""Sizes of numbers, and of gradients, that ops are tried on: an op may mix tokens only beyond a threshold."""


class Probed:
    """Results of ops of a captured program (`passes.tokens.context.Numbers`), computed on the CPU on demand.

    read: the constants that were read.
    """

    def __init__(self, captured: Captured) -> None:
        self.read: set[str] = set()
        self._captured = captured
        names = captured.names
        self._nodes = {names.params.get(n.name, names.value(n)): n for n in captured.module.graph.nodes}
        self._known: dict[fx.Node, Any] = {}
        self._apart: dict[str, bool] = {}

    def of(self, value: str) -> np.ndarray | None:
        """Return the numbers of a value that depends on constants only; None if one is on the meta device."""
        wanted = self._nodes[value]
        needed = made_of([wanted], self._known)
        for node in (node for node in self._captured.module.graph.nodes if node in needed):
            if node.op == "call_function":
                with torch.no_grad():
                    self._known[node] = _called(node, self._known)
                continue
            name = self._captured.names.params[node.name]
            self.read.add(name)
            tensor = self._captured.tensors[name].detach()
            if tensor.is_meta:
                return None
            self._known[node] = tensor.cpu()
        found = self._known[wanted].detach()
        return np.asarray((found.double() if found.is_floating_point() else found).numpy())

    def which(self, value: str) -> int:
        """Return which of the results of its op a value is."""
        node = self._nodes[value]
        place: Any = node.args[1] if node.target is operator.getitem else 0
        return int(place)

    def apart(self, op: str, reads: Sequence[Form], form: Form) -> bool:
        """Return whether an op keeps tokens apart on random numbers, forward and backward.

        Tried are slices at the start, in the middle and at the end, and numbers of all sizes for the first token.
        Equal ops are tried once.
        """
        node = self._nodes[op]
        specs = [(arg.meta["val"].shape, arg.meta["val"].dtype) for arg in node.all_input_nodes]
        others = fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: None)
        alike = str((id(node.target), specs, others, reads, form))
        if alike not in self._apart:
            self._apart[alike] = self._tried(node, reads, form)
        return self._apart[alike]

    def _tried(self, node: fx.Node, reads: Sequence[Form], form: Form) -> bool:
        wanted, layout = iter(reads), next(read.queries for read in reads if read.queries is not None)
        tokens = node.all_input_nodes[0].meta["val"].shape[layout.axis] // (layout.stride * layout.block)
        held = [arg for arg, read in zip(node.all_input_nodes, wanted, strict=False) if not read.whole]
        values = [here.meta.get("val") for here in (node, *node.all_input_nodes)]
        floats = all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)
        if layout.block != 1 or len(node.all_input_nodes) != len(reads) or not floats or len(held) != 1:
            return False
        generator = torch.Generator().manual_seed(0)
        given = {
            arg: torch.randn(arg.meta["val"].shape, generator=generator, dtype=torch.float64).to(arg.meta["val"].dtype)
            for arg in node.all_input_nodes
        }
        parts = [(0, tokens // 2), (tokens // 3, tokens - 1), (tokens - 1, tokens)]
        tries = [*((part, 1.0, 1.0) for part in parts), *(((0, 1), *sizes) for sizes in _SIZES)]
        layouts = layout, form.queries
        try:
            for part, size, steep in tries:
                scaled = {arg: value * size for arg, value in given.items()}
                if not _same_of_slice(node, scaled, held[0], layouts, tokens, part, steep):
                    return False
        except Exception:  # of the op, which does not take a slice
            return False
        return True


def _called(node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
    def on_cpu(arg: Any) -> Any:
        return torch.device("cpu") if isinstance(arg, torch.device) else given[arg] if isinstance(arg, fx.Node) else arg

    target: Any = node.target
    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), on_cpu)
    return target(*args, **kwargs)


def _same_of_slice(
    node: fx.Node,
    given: Mapping[fx.Node, torch.Tensor],
    held: fx.Node,
    layouts: tuple[TokenLayout, TokenLayout | None],
    tokens: int,
    part: tuple[int, int],
    steep: float,
) -> bool:
    """Return whether a slice of the operand gives that slice of the result and of its gradient, of size `steep`."""
    before, after = layouts
    assert after is not None

    def cut(x: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        pieces = torch.unflatten(x, layout.axis, (layout.stride, tokens, -1))
        return pieces.narrow(layout.axis + 1, part[0], part[1] - part[0]).flatten(layout.axis, layout.axis + 2)

    def like(x: torch.Tensor, y: torch.Tensor) -> bool:
        tolerance = 1e-10 if y.dtype == torch.float64 else 1e-4
        size = float(y.detach().nan_to_num(posinf=0.0, neginf=0.0).abs().max())
        return torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(size, 1e-6), equal_nan=True)

    whole = given[held].clone().requires_grad_()
    small = cut(given[held], before).clone().requires_grad_()
    made = _called(node, {**given, held: whole})
    large, own = cut(made, after), _called(node, {**given, held: small})
    if own.shape != large.shape or own.requires_grad != large.requires_grad or not like(own, large):
        return False
    if not own.requires_grad:
        return True
    weights = steep * torch.linspace(-1, 1, made.numel(), dtype=torch.float64).to(own.dtype).view(made.shape)
    (every,) = torch.autograd.grad((made * weights).sum(), whole, retain_graph=True)
    (alone,) = torch.autograd.grad((large * cut(weights, after)).sum(), whole)
    (found,) = torch.autograd.grad((own * cut(weights, after)).sum(), small)
    rest = alone.clone()
    own_tokens = torch.unflatten(rest, before.axis, (before.stride, tokens, -1))
    own_tokens.narrow(before.axis + 1, part[0], part[1] - part[0]).zero_()
    alike = like(found, cut(alone, before)) and like(found, cut(every, before))
    return alike and not bool(rest.nan_to_num().any())

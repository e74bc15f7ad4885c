"""A batch as the user passes it: taken apart into tensors, cut into micro-batches, put together again.

Forms of a batch: a mapping (keyword arguments), a tuple or list (positional arguments), a pair (tuple, dict) (both),
or anything else (one positional argument).  With a `loss_fn`, a batch is a pair (inputs, target) whose inputs have
one of these forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.ir.errors import BatchError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Batch:
    """A batch taken apart.

    leaves: every leaf in order; names: a readable name for each; spec: how to put (args, kwargs, target) together.
    rows: the common size of axis 0, or None when no tensor has an axis.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: Any
    rows: int | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor leaves, in order."""
        return tuple(x for x in self.leaves if isinstance(x, torch.Tensor))

    def is_split(self, leaf: Any) -> bool:
        """True when the leaf is cut along axis 0 with the batch."""
        return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows

    def signature(self) -> tuple[Any, ...]:
        """Everything a captured program depends on but the number of rows: hashable, equal on every rank."""
        return (str(self.spec), tuple(self._leaf_signature(x) for x in self.leaves))

    def _leaf_signature(self, leaf: Any) -> tuple[Any, ...]:
        if not isinstance(leaf, torch.Tensor):
            return ("value", type(leaf).__name__, repr(leaf))
        split = self.is_split(leaf)
        return ("split" if split else "whole", tuple(leaf.shape[1:] if split else leaf.shape), str(leaf.dtype))

    def with_rows(self, rows: int) -> Batch:
        """A batch of another number of rows for tracing: rows repeat, and no two leaves share memory."""

        def resize(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not self.is_split(leaf) or self.rows == rows:
                return leaf.detach().clone()
            assert self.rows is not None
            return leaf.detach()[torch.arange(rows, device=leaf.device) % self.rows].clone()

        return Batch(tuple(map(resize, self.leaves)), self.names, self.spec, rows if self.rows else None)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        leaves = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in self.leaves)
        return Batch(leaves, self.names, self.spec, self.rows)

    def micro(self, micro_rows: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
        """The tensor leaves of each micro-batch; what has no rows goes to all of them whole."""
        pieces: list[list[torch.Tensor]] = [[] for _ in micro_rows]
        for leaf in self.tensors:
            parts = torch.split(leaf, list(micro_rows)) if self.is_split(leaf) else [leaf] * len(micro_rows)
            for piece, part in zip(pieces, parts, strict=True):
                piece.append(part)
        return [tuple(piece) for piece in pieces]


def split_rows(rows: int, micros: int) -> tuple[int, ...]:
    """Rows of each micro-batch: as even as can be, the larger ones first.  Raises BatchError when there are fewer
    rows than micro-batches."""
    if micros < 1:
        raise BatchError(f"micro_batches is {micros}", fix="use at least 1")
    if rows < micros:
        raise BatchError(
            f"a batch of {rows} rows cannot be cut into {micros} micro-batches",
            why="every micro-batch needs at least one row",
            fix=f"pass micro_batches={rows} or fewer, or a larger batch",
        )
    small, extra = divmod(rows, micros)
    return (small + 1,) * extra + (small,) * (micros - extra)


def flatten(batch: Any, *, with_target: bool = False) -> Batch:
    """Flatten a batch of any of the accepted forms.  Raises BatchError for what cannot be cut or captured."""
    target: Any = None
    if with_target:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise BatchError(
                "with a loss_fn, a batch is a pair (inputs, target)",
                why=f"got {_describe(batch)}",
                fix="call step((inputs, target)), where inputs is a tensor, a tuple or a dict",
            )
        batch, target = batch
    args, kwargs = _arguments(batch)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs, _plain_containers(target)))
    leaves = tuple(leaf for _, leaf in paths)
    names = tuple(_name(path) for path, _ in paths)
    for name, leaf in zip(names, leaves, strict=True):
        _check_leaf(name, leaf)
    return Batch(leaves, names, spec, _rows(leaves))


def unflatten(leaves: tuple[Any, ...], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The inverse of `take_apart`: (args, kwargs, target)."""
    args, kwargs, target = pytree.tree_unflatten(list(leaves), spec)
    return args, kwargs, target


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: tuple[Any, ...] = ()
    kwargs: dict[Any, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    elif _is_args_and_kwargs(batch):
        args, kwargs = tuple(batch[0]), dict(batch[1])
    elif isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        args = tuple(batch)
    else:
        args = (batch,)
    for key in kwargs:
        if not isinstance(key, str):
            raise BatchError(f"keyword {key!r} of the batch is not a string", fix="name every keyword argument")
    return tuple(map(_plain_containers, args)), {k: _plain_containers(v) for k, v in kwargs.items()}


def _is_args_and_kwargs(batch: Any) -> bool:
    return (
        isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping)
    )


def _plain_containers(tree: Any) -> Any:
    """Mappings that pytree does not know (transformers.BatchEncoding is one) become dicts."""
    if isinstance(tree, Mapping) and type(tree) not in pytree.SUPPORTED_NODES:
        return {key: _plain_containers(value) for key, value in tree.items()}
    return tree


def _rows(leaves: tuple[Any, ...]) -> int | None:
    sizes = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0]
    if not sizes:
        return None
    counts = Counter(sizes)
    most = max(counts.values())
    return next(size for size in sizes if counts[size] == most)


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        if leaf.requires_grad:
            raise BatchError(
                f"input {name} requires a gradient",
                why="a pipeline step returns gradients of parameters only; this one would be lost",
                fix="pass it detached, or make it a parameter of the model",
            )
        if leaf.layout != torch.strided:
            raise BatchError(f"input {name} is a {leaf.layout} tensor", fix="pass a dense tensor")
        if leaf.dim() > 0 and leaf.shape[0] == 0:
            raise BatchError(f"input {name} is empty", where=f"shape {tuple(leaf.shape)}")
        return
    if not isinstance(leaf, _PLAIN):
        raise BatchError(
            f"input {name} is {_describe(leaf)}",
            why="tensors inside it would be frozen into the program",
            fix="pass tensors, numbers, strings, None, and tuples, lists or dicts of them",
        )


def _describe(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _name(path: tuple[Any, ...]) -> str:
    """A name for a leaf: `labels`, `arg0`, `target`, `arg0_mask`."""
    head, *rest = path
    part = getattr(head, "idx", None)
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "x")))) for key in rest]
    if part == 0:
        words[0] = f"arg{words[0]}"
    elif part == 2:
        words.insert(0, "target")
    text = "_".join(words)
    return "".join(c if c.isalnum() else "_" for c in text)

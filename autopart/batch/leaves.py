"""What the leaves of a batch may be, and which of them are named or counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.ir.errors import BatchError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def is_named(name: str, said: str) -> bool:
    """Return whether a leaf is what the user names, or inside of it."""
    return name == said or name.startswith(f"{said}_")


def most_common_rows(leaves: Iterable[Any]) -> int | None:
    """Return the most common size of axis 0, the first of several; None without tensors that have an axis."""
    sizes = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim() > 0]
    if not sizes:
        return None
    counts = Counter(sizes)
    most = max(counts.values())
    return next(size for size in sizes if counts[size] == most)


def check_leaf(name: str, leaf: Any) -> None:
    """Raise BatchError for a leaf that cannot be cut or captured."""
    if isinstance(leaf, torch.Tensor):
        if leaf.requires_grad:
            raise BatchError(
                f"input {name} requires a gradient",
                why="a pipeline step returns gradients of parameters only; this one would be lost",
                fix="pass it detached, or make it a parameter of the model",
            )
        if leaf.is_nested:
            raise BatchError(
                f"input {name} is a nested tensor",
                why="what one stage sends the next has one shape",
                fix="pad it: torch.nested.to_padded_tensor(x, 0.0), and pass the lengths or a mask with it",
            )
        if leaf.layout != torch.strided:
            raise BatchError(f"input {name} is a {leaf.layout} tensor", fix="pass a dense tensor")
        if leaf.dim() > 0 and leaf.shape[0] == 0:
            raise BatchError(
                f"input {name} is empty", where=f"shape {tuple(leaf.shape)}", fix="leave out batches without entries"
            )
        return
    if not isinstance(leaf, _PLAIN):
        for kind, plain in ((Enum, "its value (x.value)"), (PurePath, "its text (str(x))")):
            if isinstance(leaf, kind):
                raise BatchError(
                    f"input {name} is {described(leaf)}",
                    why="a batch holds what can be compared and sent between ranks: tensors, numbers and strings",
                    fix=f"pass {plain}, and compare with that in forward()",
                )
        array = type(leaf).__module__ == "numpy"
        raise BatchError(
            f"input {name} is {described(leaf)}",
            why="only tensors are cut into micro-batches"
            if array
            else "tensors inside it would be frozen into the program",
            fix="pass torch.as_tensor(x)"
            if array
            else "pass tensors, numbers, strings, None, and tuples, lists or dicts of them",
        )


def check_lists(names: Sequence[str], leaves: Sequence[Any], tree: Any, stated: Collection[str]) -> None:
    """Raise BatchError for a list with an entry of several tensors for each row: it has no axis to cut along.  stated:
    inputs of which the user says whether they have rows."""
    lists = {id(leaf) for found in _lists_of_mappings(tree) for leaf in pytree.tree_leaves(found)}
    rows = most_common_rows(leaf for leaf in leaves if id(leaf) not in lists)
    for found in _lists_of_mappings(tree):
        inside = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        if len(found) != rows or not inside or all(leaf.dim() and leaf.shape[0] == rows for leaf in inside):
            continue
        first = next(name for name, leaf in zip(names, leaves, strict=True) if leaf is inside[0])
        if any(is_named(first, said) for said in stated):
            continue
        raise BatchError(
            f"input {first.split('_0_')[0]} is a list with an entry for each row",
            why="only tensors are cut into micro-batches, along their first axis",
            fix="pad the entries to one size and stack them: for each key a tensor with a row for each entry",
        )


def _lists_of_mappings(tree: Any) -> Iterator[Sequence[Any]]:
    if isinstance(tree, (list, tuple)) and tree and all(isinstance(item, Mapping) and item for item in tree):
        yield tree
    elif isinstance(tree, (list, tuple, Mapping)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _lists_of_mappings(part)


def described(value: Any) -> str:
    """Return the class of a value, in words."""
    return f"a {type(value).__module__}.{type(value).__qualname__}"

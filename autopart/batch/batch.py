"""A batch as the user passes it: flattened into tensors, cut into micro-batches, put together again.

Forms of a batch: a mapping (keyword arguments), a tuple or list (positional arguments), a pair (tuple, dict) (both),
or anything else (one positional argument).  With a `loss_fn`, a batch is a pair (inputs, target) whose inputs have
one of these forms.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from autopart.batch.leaves import check_leaf, check_lists, described, is_named, most_common_rows
from autopart.ir.errors import BatchError, UsageWarning

NOTHING: Mapping[str, int | None] = MappingProxyType({})
_VALUES = {int: torch.int64, float: torch.float64, str: None, bytes: None}
"""Types of leaves that a program may be free of, with the dtype in which it reads numbers."""


@dataclass(frozen=True)
class Batch:
    """A flattened batch.

    leaves: every leaf in order; keys: the path of each; names: a readable name for each; splits: whether each is a
    tensor that is cut along axis 0; axes: the axis of rows in what the user passes, which is the first in leaves.
    spec: how to put (args, kwargs, target) together.  rows: the common size of axis 0 of the cut tensors, None if there
    are none.  answers: the op, line and value of each question that the model's Python asks about the numbers of the
    batch; None if unknown.  stands_in: whether another rank has the numbers.  masks: what the first attention masks
    hide (`reads.masks`), if the batch is not to be asked; None to ask it.  kept: values that the program begins with
    instead of computing them (`shortened.without_prefix`), by name, cut along axis 0; the program has them as inputs
    behind the tensor leaves.  free: the leaves, by index, that were numbers or texts and whose values the program does
    not depend on: numbers are tensors here, which it reads (`watch.values`).
    """

    leaves: tuple[Any, ...]
    keys: tuple[str, ...]
    names: tuple[str, ...]
    splits: tuple[bool, ...]
    spec: Any
    rows: int | None
    answers: tuple[tuple[str, str, Any], ...] | None = None
    stands_in: bool = False
    masks: tuple[str, ...] | None = None
    kept: tuple[tuple[str, torch.Tensor], ...] = ()
    axes: tuple[int, ...] = ()
    free: tuple[int, ...] = ()

    @property
    def plain(self) -> Batch:
        """The batch as the user passed it, without `kept`."""
        return replace(self, kept=()) if self.kept else self

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor leaves, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def tensors_and_splits(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """The tensor leaves, in order, each with whether it is cut along axis 0; then what is kept."""
        for leaf, split in zip(self.leaves, self.splits, strict=True):
            if isinstance(leaf, torch.Tensor):
                yield leaf, split
        for _, tensor in self.kept:
            yield tensor, True

    @property
    def values(self) -> tuple[int, ...]:
        """The leaves, by index, that are numbers or texts, but for numbers that no tensor holds."""
        return tuple(
            place
            for place, leaf in enumerate(self.leaves)
            if type(leaf) in _VALUES and not (type(leaf) is int and leaf.bit_length() > 63)
        )

    def freed(self, free: Sequence[int]) -> Batch:
        """Return the batch with these leaves free, numbers as tensors."""
        leaves = list(self.leaves)
        for place in free:
            dtype = _VALUES[type(leaves[place])]
            leaves[place] = leaves[place] if dtype is None else torch.tensor(leaves[place], dtype=dtype)
        return replace(self, leaves=tuple(leaves), free=tuple(free))

    def signature(self, free: Sequence[int] = ()) -> tuple[Any, ...]:
        """Return everything but the number of rows that a captured program depends on; equal on every rank.  free: more
        leaves whose values do not count."""
        leaves = zip(self.leaves, self.splits, strict=True)
        parts = [_leaf_signature(leaf, split) for leaf, split in leaves]
        for place in (*self.free, *free):
            leaf = self.leaves[place]
            kind = type(leaf.item()) if isinstance(leaf, torch.Tensor) else type(leaf)
            parts[place] = ("free", kind.__name__)
        plain: tuple[Any, ...] = (str(self.spec), tuple(parts))
        if self.masks is not None:
            plain = (*plain, self.masks)
        if self.kept:
            plain = (*plain, *((name, *_leaf_signature(tensor, True)) for name, tensor in self.kept))
        if any(self.axes):
            plain = (*plain, self.axes)
        return plain if not self.answers else (*plain, tuple(repr(value) for _, _, value in self.answers))

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return (args, kwargs, target) as the user passes them, of leaves like those of this batch."""
        axes = self.axes or (0,) * len(leaves)
        given = [leaf.movedim(0, axis).contiguous() if axis else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        args, kwargs, target = pytree.tree_unflatten(given, self.spec)
        return args, kwargs, target

    def stated(self, name: str, axis: int | None) -> Batch:
        """Return the batch with its rows on another axis of this input, none if None."""
        place = self.names.index(name)
        leaf, split = self.leaves[place], list(self.splits)
        split[place] = axis is not None
        leaves, axes = [*self.leaves], [*self.axes]
        leaves[place], axes[place] = leaf.movedim(axis or 0, 0), axis or 0
        return replace(self, leaves=tuple(leaves), splits=tuple(split), axes=tuple(axes))

    def changed(self, change: Callable[[torch.Tensor, bool], torch.Tensor], rows: int | None) -> Batch:
        """Return the batch with other tensors.  change: maps a tensor, and whether it is cut, to the new one."""
        leaves = tuple(
            change(leaf, split) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, split in zip(self.leaves, self.splits, strict=True)
        )
        kept = tuple((name, change(tensor, True)) for name, tensor in self.kept)
        return replace(self, leaves=leaves, rows=rows, kept=kept)

    def with_rows(self, rows: int) -> Batch:
        """Return a batch of another number of rows for tracing: rows repeat, and no two leaves share memory."""

        def resize(tensor: torch.Tensor, split: bool) -> torch.Tensor:
            if not split or self.rows == rows:
                return tensor.detach().clone()
            assert self.rows is not None
            return tensor.detach()[torch.arange(rows, device=tensor.device) % self.rows].clone()

        return self.changed(resize, rows if self.rows else None)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device.  Raises BatchError for a tensor on the meta device."""
        for name, leaf in zip(self.names, self.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.is_meta and device.type != "meta":
                raise BatchError(
                    f"input {name} is on the meta device, and the model is on {device}",
                    why="it has a shape but no values",
                    fix='pass a batch with values, or plan with the model on the meta device too (model.to("meta"))',
                )
        return self.changed(lambda tensor, _: tensor.to(device), self.rows)

    def micro(self, micro_rows: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of each micro-batch, in order; those without rows go to all of them whole."""
        pieces: list[list[torch.Tensor]] = [[] for _ in micro_rows]
        for tensor, split in self.tensors_and_splits():
            parts = torch.split(tensor, list(micro_rows)) if split else [tensor] * len(micro_rows)
            for piece, part in zip(pieces, parts, strict=True):
                piece.append(part)
        return [tuple(piece) for piece in pieces]


def _leaf_signature(leaf: Any, split: bool) -> tuple[Any, ...]:
    if not isinstance(leaf, torch.Tensor):
        return ("value", type(leaf).__name__, _text_of(leaf))
    return ("split" if split else "whole", tuple(leaf.shape[1:] if split else leaf.shape), str(leaf.dtype))


def _text_of(value: Any) -> str:
    """Return a value as text; a subclass of a number or string may print as it likes."""
    bases = (float, complex, int, str, bytes)
    base: Any = next((base for base in bases if isinstance(value, base)), type(value))
    return str(base.__repr__(value))


def split_rows(rows: int, micros: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch, as even as possible, the larger ones first.

    Raises BatchError if there are fewer rows than micro-batches.
    """
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


class BatchReader:
    """Flattens batches, and remembers which of their tensors have rows.

    In the first batch the rows are the most common size of axis 0, and every tensor of that size is cut.  In later
    batches a tensor under the same key is cut or left whole as before, even if its size equals the rows by chance.
    """

    def __init__(self, rows_axis: Mapping[str, int | None] = NOTHING) -> None:
        """rows_axis: the option, which says of inputs by name on which axis they have rows, None for none."""
        self._stated = rows_axis
        self._splits: dict[str, bool] = {}
        self._order: Any = None
        self._named: tuple[Any, tuple[str, ...], tuple[str, ...]] = (None, (), ())  # a structure: its keys and names

    def read(self, batch: Any, *, with_target: bool = False) -> Batch:
        """Flatten a batch of any accepted form.  Raises BatchError for what cannot be cut or captured."""
        target: Any = None
        if isinstance(batch, DataLoader | Iterator):
            raise BatchError(
                f"the batch is {described(batch)}, not one batch",
                fix="pass sample=next(iter(loader)) to compile, and train with: for batch in loader: pipe.step(batch)",
            )
        if with_target:
            batch, target = _pair(batch)
        args, kwargs = _arguments(batch)
        tree = _in_order_of((args, kwargs, _plain_containers(target)), self._order)
        found, spec = pytree.tree_flatten(tree)
        leaves = tuple(found)
        if spec != self._named[0]:
            paths = [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
            self._named = spec, tuple(map(pytree.keystr, paths)), tuple(map(_name, paths))
        _, keys, names = self._named
        for name, leaf in zip(names, leaves, strict=True):
            check_leaf(name, leaf)
        axes = tuple(self._axis(key, name, leaf) for key, name, leaf in zip(keys, names, leaves, strict=True))
        check_lists(names, leaves, tree, self._stated)
        leaves = tuple(leaf.movedim(axis, 0) if axis else leaf for leaf, axis in zip(leaves, axes, strict=True))
        rows = self._rows(keys, names, leaves)
        splits = tuple(
            isinstance(leaf, torch.Tensor) and self._splits.get(key, leaf.dim() > 0 and leaf.shape[0] == rows)
            for key, leaf in zip(keys, leaves, strict=True)
        )
        for key, leaf, split in zip(keys, leaves, splits, strict=True):
            if isinstance(leaf, torch.Tensor):
                self._splits[key] = split
        if self._order is None:
            self._order = pytree.tree_unflatten([None] * len(leaves), spec)
            unknown = [said for said in self._stated if not any(is_named(name, said) for name in names)]
            if unknown:
                text = f"rows_axis names {', '.join(unknown)}, and the inputs of this batch are {', '.join(names)}"
                warnings.warn(text, UsageWarning, stacklevel=1)
        return Batch(leaves, keys, names, splits, spec, rows, axes=axes)

    def _axis(self, key: str, name: str, leaf: Any) -> int:
        """Return the axis on which an input has rows, as it is stated, and note whether it has any."""
        said = next((said for said in self._stated if is_named(name, said)), None)
        if said is None or not isinstance(leaf, torch.Tensor):
            return 0
        axis = self._stated[said]
        self._splits[key] = axis is not None
        if axis is not None and not -leaf.dim() <= axis < leaf.dim():
            raise BatchError(
                f"rows_axis says that input {name} has rows on axis {axis}",
                why=f"its shape is {tuple(leaf.shape)}",
                fix="state an axis that it has, or None if it has no rows",
            )
        return (axis or 0) % max(1, leaf.dim())

    def _rows(self, keys: Sequence[str], names: Sequence[str], leaves: Sequence[Any]) -> int | None:
        """Return the rows of a batch: those of tensors that had rows before, else the most common size of axis 0."""
        found: dict[str, int] = {}
        for key, name, leaf in zip(keys, names, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and self._splits.get(key):
                if leaf.dim() == 0:
                    raise BatchError(f"input {name} is a single number", why="in an earlier batch it had rows")
                found[name] = leaf.shape[0]
        if not found:
            return most_common_rows(leaf for key, leaf in zip(keys, leaves, strict=True) if key not in self._splits)
        first = next(iter(found))
        for name, rows in found.items():
            if rows != found[first]:
                raise BatchError(
                    f"inputs {first} and {name} have {found[first]} and {rows} rows",
                    why="both are cut into micro-batches by rows, as in the first batch or by rows_axis=",
                    fix=f'give both as many rows; for one without, compile with rows_axis={{"{name}": None}}',
                )
        return found[first]


def flatten(batch: Any, *, with_target: bool = False, rows_axis: Mapping[str, int | None] = NOTHING) -> Batch:
    """Flatten a first batch; see `BatchReader.read`."""
    return BatchReader(rows_axis).read(batch, with_target=with_target)


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    several = isinstance(batch, (tuple, list))
    raise BatchError(
        "with a loss_fn, a batch is a pair (inputs, target)",
        why=f"got {f'{len(batch)} values' if several else described(batch)}",
        fix="pass several inputs as a tuple: ((x, y), target)"
        if several
        else "call step((inputs, target)), where inputs is a tensor, a tuple or a dict",
    )


def _in_order_of(tree: Any, earlier: Any) -> Any:
    """Return the tree with the keys of its dicts in their earlier order: the order of keys means nothing."""
    if type(tree) is dict and isinstance(earlier, dict):
        keys = [key for key in earlier if key in tree] + [key for key in tree if key not in earlier]
        return {key: _in_order_of(tree[key], earlier.get(key)) for key in keys}
    if type(tree) in (tuple, list) and isinstance(earlier, (tuple, list)) and len(tree) == len(earlier):
        return type(tree)(_in_order_of(part, before) for part, before in zip(tree, earlier, strict=True))
    return tree


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: tuple[Any, ...] = ()
    kwargs: dict[Any, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    elif isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], Mapping):
        args, kwargs = tuple(batch[0]), dict(batch[1])
    elif isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        args = tuple(batch)
    else:
        args = (batch,)
    for key in kwargs:
        if not isinstance(key, str):
            raise BatchError(f"keyword {key!r} of the batch is not a string", fix="name every keyword argument")
    return tuple(map(_plain_containers, args)), {k: _plain_containers(v) for k, v in kwargs.items()}


def _plain_containers(tree: Any) -> Any:
    """Turn mappings that pytree does not know, such as transformers.BatchEncoding, into dicts."""
    if isinstance(tree, Mapping) and type(tree) not in pytree.SUPPORTED_NODES:
        return {key: _plain_containers(value) for key, value in tree.items()}
    return tree


def _name(path: tuple[Any, ...]) -> str:
    """Return a name for a leaf: `labels`, `arg0`, `target`, `arg0_mask`."""
    head, *rest = path
    part = getattr(head, "idx", None)
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "x")))) for key in rest]
    if part == 0:
        words[0] = f"arg{words[0]}"
    elif part == 2:
        words.insert(0, "target")
    text = "_".join(words)
    return "".join(c if c.isalnum() else "_" for c in text)

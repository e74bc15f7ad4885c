"""The frozen layers of one kind of batch: which values they end with, and the code that computes them for some rows."""

from __future__ import annotations

import hashlib
import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.extras.freezing.kept.store import Tag
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Op
from autopart.ir.shares import RowLayout
from autopart.passes.graph.prefixes import frozen_end
from autopart.planning.derive.family import mark_rows
from autopart.planning.derive.reduction import WHOLE, coupling_ops, family_of_batch, row_layouts
from autopart.runtime.stages.stage_module import StageModule
from autopart.stagecode.split import cut
from autopart.stagecode.stage_graph import text_of

_version = operator.attrgetter("_version")
_address = operator.methodcaller("data_ptr")
_LOOKED_AT = 64
"""Bytes of each tensor that are looked at before every step."""


class Sources:
    """Tensors that activations are computed from, as they were when they were last followed.

    Torch counts the writes to a tensor, but not those through `.data`, through numpy, or to memory that it shares with
    others.  These show where some numbers of a tensor are looked at, which costs next to nothing on the CPU, if they
    touch them; and once all numbers are read again.

    sums: checksums of their numbers, shapes and types."""

    def __init__(self, names: Sequence[str], constants: Mapping[str, torch.Tensor]) -> None:
        """names: of all tensors.  constants: those that are not the model's own."""
        self._names, self._constants = names, constants
        self._tensors: list[torch.Tensor] = []
        self._strided: list[torch.Tensor] = []
        self._places: list[Any] = []
        self._before: tuple[Any, ...] = ()
        self.sums: dict[str, int] = {}

    def follow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether other tensors are held now, or one was seen to change: then all numbers are read.

        tensors: the model's.  O(tensors)."""
        now = [self._constants[name] if name in self._constants else tensors[name] for name in self._names]
        same = len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))
        if same and self._before == self._state():
            return False
        self._tensors = now
        self._strided = [tensor for tensor in now if tensor.layout is torch.strided]
        self._places = [_place(tensor) for tensor in self._strided if _is_plain(tensor)]
        self._before, self.sums = self._state(), self._summed()
        return True

    def _state(self) -> tuple[Any, ...]:
        return [*map(_version, self._tensors)], [*map(_address, self._strided)], b"".join(self._places)

    def _summed(self) -> dict[str, int]:
        return {name: _checksum(tensor) for name, tensor in zip(self._names, self._tensors, strict=True)}

    def prove(self) -> None:
        """Read all numbers.  Raises RefusedError if some are others than when tensors were last followed."""
        changed = [name for name, found in self._summed().items() if found != self.sums[name]]
        if changed:
            self._before = ()  # the next step follows them
            raise RefusedError(
                f"{changed[0]} of a frozen layer was written to unnoticed while activations were kept",
                why="torch does not count writes through .data, numpy or shared memory; steps since the last check, at "
                "most one pass over the samples, may have used activations of the earlier values",
                fix=f"write to it where torch counts: with torch.no_grad(): {changed[0]}.copy_(...); the next step "
                "computes what is kept anew",
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of a tensor can be looked at for free."""
    dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.numel() > 0 and dense


def _place(tensor: torch.Tensor) -> Any:
    """Return a window to some bytes in the middle of a tensor."""
    numbers = tensor.detach().view(-1).view(torch.uint8).numpy()
    middle = len(numbers) // 2
    return numbers[max(0, middle - _LOOKED_AT // 2) : middle + _LOOKED_AT // 2].data


def _checksum(tensor: torch.Tensor) -> int:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    numbers = dense.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(numbers.data, zlib.crc32(repr((tensor.shape, tensor.dtype)).encode()))


Tensors = Mapping[str, torch.Tensor]
_WHAT = "activations at the end of the frozen layers cannot be kept by sample"


@dataclass
class FrozenCode:
    """The frozen layers of batches of one kind, captured for some rows.

    values: what they end with, each with a row of axis 0 for every sample.
    """

    captured: Captured
    values: tuple[str, ...]
    device: torch.device
    _made: dict[tuple[tuple[str, ...], tuple[str, ...]], StageModule] = field(default_factory=dict)
    _inputs: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)
    _tags: dict[tuple[str, ...], Tag] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The parameters, buffers and constants that the values depend on."""
        return tuple(dict.fromkeys(name for op in self._ops((), self.values) for name in op.params))

    @cached_property
    def sources(self) -> Sources:
        """The same, as they are."""
        kinds, held = self.captured.names.kinds, self.captured.tensors
        return Sources(self.tensors, {name: held[name] for name in self.tensors if kinds[name] == "constant"})

    def follow(self, tensors: Tensors) -> bool:
        """Return whether a tensor that the values depend on may have changed, as `Sources.follow`."""
        changed = self.sources.follow(tensors)
        if changed:
            self._tags.clear()
            self._made.clear()  # constants may have been copied to a device
        return changed

    def tag(self, values: tuple[str, ...]) -> Tag:
        """Return what values of this program are.  They depend on the ops that make them, which hold all Python values
        that were read while they were traced, and on the numbers of tensors."""
        if values not in self._tags:
            digest = hashlib.blake2b(digest_size=16)
            if self.starts_at(values):
                code = self._code((), values)
                sums = [self.sources.sums[name] for name in code.params]
                digest.update(repr((text_of(code.module), code.inputs, sums)).encode())
            self._tags[values] = values, digest.digest()
        return self._tags[values]

    def inputs(self, values: tuple[str, ...]) -> tuple[int, ...]:
        """Return the places, among the tensors of a batch, of the inputs that values depend on."""
        if values not in self._inputs:
            read = {name for op in self._ops((), values) for name in op.reads}
            self._inputs[values] = tuple(at for at, name in enumerate(self.captured.graph.inputs) if name in read)
        return self._inputs[values]

    def specs(self, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each value, for this number of rows."""
        known = self.captured.graph.value_map()
        return {n: ((rows, *known[n].shape[1:]), getattr(torch, known[n].dtype)) for n in self.values}

    def starts_at(self, earlier: Sequence[str]) -> bool:
        """Return whether the values follow from these, which frozen layers made."""
        return {*earlier} <= {name for op in self._ops((), self.values) for name in op.writes}

    def _ops(self, earlier: Sequence[str], values: Sequence[str]) -> list[Op]:
        graph = self.captured.graph
        chosen = graph.ops_between(earlier, values)
        return [op for op in graph.ops if op.name in chosen]

    @torch.no_grad()
    def run(self, batch: Batch, rows: Sequence[int], tensors: Tensors, earlier: Tensors) -> dict[str, torch.Tensor]:
        """Return the values for these rows of a batch, on the CPU.

        tensors: the model's, by name.  earlier: values that are known of these rows, () if none; only what follows is
        computed.  Runs as many rows at a time as the program was captured for; the last ones are repeated.
        """
        names = tuple(earlier)
        size = self.captured.graph.rows
        code = self._code(names, self.values)
        found: dict[str, list[torch.Tensor]] = {name: [earlier[name]] if name in names else [] for name in self.values}
        for start in range(0, len(rows), size):
            own = [*range(start, min(start + size, len(rows)))]
            picked = torch.tensor([*own, *[own[-1]] * (size - len(own))])
            pairs = zip(self.captured.graph.inputs, batch.plain.tensors_and_splits(), strict=True)
            at = torch.tensor(rows)[picked]
            given = {name: tensor[at.to(tensor.device)] if split else tensor for name, (tensor, split) in pairs}
            given |= {name: earlier[name][picked] for name in names}
            inputs = [given[name].to(self.device) for name in code.inputs]
            results = code.module(*code.arguments(tensors), *inputs)
            for name, result in zip(code.outputs, results, strict=False):
                found[name].append(result[: len(own)].cpu())
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _code(self, earlier: tuple[str, ...], values: tuple[str, ...]) -> StageModule:
        key = earlier, values
        if key not in self._made:
            ops = {op.name for op in self._ops(earlier, values)}
            self._made[key] = cut(self.captured, ops, [n for n in values if n not in earlier], self.device)
        return self._made[key]


def frozen_code(
    captures: CaptureCache, batch: Batch, rows: int, device: torch.device, values: Sequence[str] | None = None
) -> FrozenCode:
    """Return the frozen layers of batches like this one, proven to be a function of each sample alone.

    rows: that are run at once, on `device`.  values: where they end, as determined by another batch; None for what is
    frozen now.  Without anything frozen the code has no values.  Raises RefusedError, naming what is in the way: ops
    that draw random numbers, take statistics of the batch or change a buffer; and values that do not hold the rows
    apart.
    """
    batch = batch.plain
    family = family_of_batch(captures, batch, (rows, rows))
    assert family.other is not None
    graph = mark_rows(family.base.graph, family.other.graph)
    ends = frozen_end(graph) if values is None else tuple(values)
    captured = captures(batch, family.base.graph.size)
    if not ends:
        return FrozenCode(captured, (), device)
    if not {*ends} <= graph.value_map().keys():
        raise RefusedError(
            _WHAT, why="batches of this kind run another program than the one that was planned",
            fix="leave out samples= for them, or call pipe.replan(optimizer, cache=...) for the model as it is now",
        )  # fmt: skip
    _refuse_impure(graph, ends)
    try:
        layouts = row_layouts(family, WHOLE, ends, ())
    except RefusedError as error:
        raise RefusedError(_WHAT, where=error.where, why=error.why, fix=_FIX) from error
    for name in ends:
        if layouts[name] != RowLayout(0, 1):
            raise RefusedError(
                _WHAT, where=_where(graph, name), why=f"value {name} does not have the rows on its first axis",
                fix="put the rows of the batch first in what the last frozen layer returns, or leave cache= out",
            )  # fmt: skip
    return FrozenCode(captured, ends, device)


_FIX = "leave cache= out of pipe.replan"


def _refuse_impure(graph: Graph, ends: Sequence[str]) -> None:
    chosen = graph.ops_between((), ends)
    learning, coupling = graph.learning_ops(), coupling_ops(graph)
    for op in graph.ops:
        if op.name not in chosen:
            continue
        if op.name in learning:
            why, fix = "it learns again", "call pipe.replan(optimizer) on every rank"
        elif op.random:
            why = f"{op.target} draws random numbers anew in each step"
            fix = (
                f"call model.get_submodule({op.module!r}).eval() if frozen layers shall draw none, or leave cache= out"
            )
        elif op.name in coupling:
            why = f"{op.target} takes statistics of the batch, or changes a buffer"
            fix = f"call model.get_submodule({op.module!r}).eval() if its statistics shall be frozen too"
        else:
            continue
        raise RefusedError(_WHAT, where=f"module {op.module} at {op.where}", why=why, fix=fix)


def _where(graph: Graph, value: str) -> str:
    op = next((op for op in graph.ops if value in op.writes), None)
    return f"module {op.module} at {op.where}" if op is not None else value

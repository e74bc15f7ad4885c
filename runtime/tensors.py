"""The model's tensors on this rank, and their exchange between ranks by original name."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from autopart.ir.errors import PlanError, RefusedError, UsageError, UsageWarning
from autopart.ir.shares import Piece, whole
from autopart.runtime.group.world import World
from autopart.runtime.masters import Masters, needs_master

Values = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Returns tensors with values for tensors on the meta device, by name (`like`)."""


def like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory on a device for what a tensor on the meta device stands for, with numbers of any kind."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def common(tensor: torch.Tensor, own: Piece, other: Piece) -> torch.Tensor:
    """Return the part of a piece, `tensor`, that another piece of the same tensor has too: a view, which may be empty.
    Where one of them has several blocks, their axis is (blocks, the rest).

    Raises PlanError for an axis that cannot be cut into equal parts."""
    if own.blocks > 1 or other.blocks > 1:
        return _in_blocks(tensor, own, other)
    if other.is_whole:
        return tensor
    held = tensor.shape[other.axis] if other.axis < tensor.dim() else 0
    size, offset = (held * own.parts, held * own.index) if own.axis == other.axis else (held, 0)
    if not size or size % other.parts:
        what = f"{own} of shape {[*tensor.shape]} has no {other.parts} equal parts along axis {other.axis}"
        raise PlanError(what, fix="use a number of ranks that divides it, or leave it whole")
    size //= other.parts
    first = min(max(other.index * size - offset, 0), held)
    return tensor.detach().narrow(other.axis, first, min(max((other.index + 1) * size - offset, first), held) - first)


def _in_blocks(tensor: torch.Tensor, own: Piece, other: Piece) -> torch.Tensor:
    """Return `common` of two pieces that are parts of the same blocks of an axis, of which one may be cut elsewhere."""
    axis, blocks = max((each.blocks, each.axis) for each in (own, other))[::-1]

    def inside(piece: Piece) -> Piece:
        if not piece.is_whole and piece.axis == axis and piece.blocks != blocks:
            what = f"{own} and {other} do not divide the same blocks of axis {axis}"
            raise PlanError(what, fix="go through a checkpoint, or a plan with tensor_parallel=1")
        return replace(piece, axis=piece.axis + (piece.axis >= axis and not piece.is_whole), blocks=1)

    if tensor.shape[axis] % blocks:
        raise PlanError(f"{own} of shape {[*tensor.shape]} has no {blocks} equal blocks along axis {axis}")
    return common(torch.unflatten(tensor.detach(), axis, (blocks, -1)), inside(own), inside(other))


def without_values(wanted: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Raise RefusedError for the first of these tensors."""
    raise RefusedError(
        f"{next(iter(wanted))} is on the meta device, and this rank has no value of it",
        why="what this rank runs now uses it, and the training step that was planned does not",
        fix="build the model with values; or compile with a batch for which the step uses it on this rank too",
    )


class LocalTensors:
    """This rank's parameters, buffers and constants by name, on its device.

    A tensor that is on the device already is the model's own object, so an optimizer made for the model updates it.
    Others are copied once, and keep their `requires_grad`; so is a piece, where a tensor is not held whole.  What the
    model has on the meta device gets its value here, and has none in the model.
    """

    def __init__(
        self,
        device: torch.device,
        earlier: LocalTensors | None = None,
        mastered: Callable[[str], bool] = lambda _: False,
        values: Values = without_values,
        piece: Callable[[str], Piece] = whole,
    ) -> None:
        """earlier: what this rank held before, taken over as the same objects.  mastered: whether this rank has the
        master weight of a parameter in half precision.  values: of tensors on the meta device, until `settle`.  piece:
        returns what this rank holds of a tensor."""
        self._device = device
        self.held: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._earlier = earlier
        self._mastered, self._values, self.piece = mastered, values, piece
        self.masters = Masters()

    def hold(self, names: Iterable[str], source: Mapping[str, torch.Tensor]) -> None:
        """Hold the named tensors that are not held yet."""
        earlier = self._earlier
        before = {n: t for n, t in earlier.held.items() if earlier.piece(n) == self.piece(n)} if earlier else {}
        fresh = [name for name in dict.fromkeys(names) if name not in self.held]
        unknown = {name: source[name] for name in fresh if name not in before and source[name].is_meta}
        given = self._values(unknown) if unknown else {}
        for name in fresh:
            found = before.get(name)
            held = self.held[name] = found if found is not None else self._placed(name, given.get(name, source[name]))
            self._dtypes[name] = held.dtype
            known = earlier.masters if earlier is not None and name in before else Masters()
            if self._mastered(name) and (needs_master(held) or name in known.by_name):
                self.hold_master(name, known)

    def hold_master(self, name: str, known: Masters | None = None) -> None:
        """Make the master weight of a held parameter, or take it over from `known`."""
        held = self.held[name]
        assert isinstance(held, torch.nn.Parameter)
        self.masters.hold(name, held, known)

    def settle(self, values: Values = without_values) -> None:
        """Release what was held before and is not held any more.  values: of tensors on the meta device from now on,
        as training changes others."""
        self._earlier, self._values = None, values

    def check(self) -> None:
        """Raise RefusedError if a tensor was converted in place, as by model.to(dtype), or written to beside its
        master."""
        for name, tensor in self.held.items():
            if tensor.dtype != self._dtypes[name]:
                raise RefusedError(
                    f"{name} is of {tensor.dtype}, and was of {self._dtypes[name]} when the model was compiled",
                    why="the program, and what it sends between ranks, is of that type",
                    fix="convert the model before compile; or close the pipe and compile again for another precision",
                )
        self.masters.check()

    def follow_flags(self, trained: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Give copies of parameters on this device the requires_grad of the model's own.

        Raises RefusedError for a parameter that is trained now and was frozen when masters were made."""
        for name, parameter in trained:
            held = self.held.get(name)
            if held is not None and held.requires_grad != parameter.requires_grad:
                held.requires_grad_(parameter.requires_grad)
            if held is not None and needs_master(held) and name not in self.masters.by_name and self._mastered(name):
                raise RefusedError(
                    f"{name} is trained now, and was frozen when the model was compiled",
                    why="it has no master in fp32: optimizers made from pipe.parameters() would not see its gradient",
                    fix="keep requires_grad=True until compile; freeze it afterwards",
                )
        self.masters.follow()

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        own = self.cut(name, tensor)
        if own is tensor and tensor.device == self._device:
            return tensor
        copy = (own.detach() if own is tensor else own.clone()).to(self._device)
        return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece that this rank holds of a whole tensor, or of its state: a view, of blocks a copy."""
        piece = self.piece(name)
        own = common(tensor, whole(name), piece)
        own = own.flatten(piece.axis, piece.axis + 1) if piece.blocks > 1 else own
        if own is not tensor and name in self.held and own.shape != self.held[name].shape:
            raise UsageError(f"state of {name} is of shape {tuple(tensor.shape)}, and {name} is held in pieces")
        return own

    def write(self, name: str, tensor: torch.Tensor, own: torch.Tensor) -> None:
        """Write the piece that this rank holds into its place in a whole tensor."""
        part = common(tensor, whole(name), self.piece(name))
        part.copy_(own.reshape(part.shape))

    @property
    def driven(self) -> Mapping[str, torch.Tensor]:
        """The held tensors, masters in place of the parameters that they round to: what gradients go to."""
        return {**self.held, **self.masters.by_name}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor of these numbers; gradients of embeddings with sparse=True are sparse."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def laid_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of these numbers that lies in memory as a parameter of its shape does, as autograd lays
    gradients: fused kernels of optimizers run through both side by side.  A copy only where the order differs."""
    strides = parameter.stride()
    if tensor.layout != torch.strided or tensor.shape != parameter.shape or tensor.stride() == strides:
        return tensor
    if tensor.is_contiguous() and parameter.is_contiguous():  # axes of one entry alone have other strides
        return tensor.as_strided(tensor.shape, strides)
    laid = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device, requires_grad=False)
    return tensor if tensor.stride() == laid.stride() else laid.copy_(tensor)


def broadcast_weights_if_different(world: World, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of rank 0 to every rank, as DistributedDataParallel does.  Collective.

    Hashes of their bytes are compared first, so nothing is sent if the ranks built the same model.
    """
    if world.size == 1:
        return
    names = sorted(name for name, tensor in tensors.items() if not tensor.is_meta)
    hashes = [_hash(tensors[name]) for name in names]
    together = hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
    if len(set(world.gather_objects(together))) == 1:
        return
    everyone = world.gather_objects(hashes)
    differing = [name for name, *found in zip(names, *everyone, strict=True) if len(set(found)) > 1]
    if differing and world.rank == 0:
        warnings.warn(
            f"the ranks built different weights ({differing[0]} and {len(differing) - 1} more): those of rank 0 are "
            "used; seed the construction of the model alike on every rank to save sending them",
            UsageWarning,
            stacklevel=2,
        )
    for name in differing:
        tensor = tensors[name]
        with torch.no_grad():
            tensor.copy_(world.broadcast(tensor.detach().cpu().contiguous(), 0))


def require_equal_values(world: World, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise on all ranks if ranks have different values of a tensor.  tensors: of this rank, those that others have
    too.  Collective.  Reads the tensors once."""
    everyone = world.gather_objects({name: _hash(tensor) for name, tensor in tensors.items()})
    seen: dict[str, tuple[int, str]] = {}
    for rank, hashes in enumerate(everyone):
        for name, own in hashes.items():
            first, other = seen.setdefault(name, (rank, own))
            if own != other:
                raise world.known(
                    UsageError(
                        f"ranks {first} and {rank} got different values of {name}",
                        why="they read different files, or their devices draw different random numbers",
                        fix="give every rank the same files",
                    )
                )


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    # Processors have instructions for it; it guards against mistakes, not against an attack.
    return hashlib.sha1(data.numpy().data, usedforsecurity=False).hexdigest()


def gather_tensors(
    world: World,
    owners: Mapping[Piece, int],
    like: Mapping[str, torch.Tensor],
    local: Callable[[str], torch.Tensor | None],
) -> dict[str, torch.Tensor | None]:
    """Return the tensors of these pieces, whole, on every rank, on the CPU.  Collective.

    owners: the rank that has a piece.  By name: like: a tensor of the shape and dtype of the whole; local: returns the
    piece on its owner, or None, which is zero if another rank has one.  Sparse tensors become dense.  Bytes sent: the
    size of all tensors, to every rank.
    """
    present = {p.name for p, rank in owners.items() if rank == world.rank and local(p.name) is not None}
    everyone = set[str]().union(*world.gather_objects(present))
    result: dict[str, torch.Tensor | None] = {}
    for piece, rank in owners.items():
        name = piece.name
        if name not in everyone:
            result[name] = None
            continue
        held = local(name) if rank == world.rank else None
        if held is None:
            data = torch.zeros(_shape(like[name], piece), dtype=like[name].dtype)
        else:
            data = dense(held.detach()).cpu().clone()
        data = world.broadcast(data.contiguous(), rank)
        if not piece.is_whole:
            into = result.setdefault(name, torch.empty(like[name].shape, dtype=data.dtype))
            assert into is not None
            part = common(into, whole(name), piece)
            part.copy_(data.reshape(part.shape))
            data = into
        result[name] = data
    return result


def _shape(tensor: torch.Tensor, piece: Piece) -> torch.Size:
    """Return the shape of a piece of a whole tensor."""
    part = common(tensor, whole(piece.name), piece)
    return part.flatten(piece.axis, piece.axis + 1).shape if piece.blocks > 1 else part.shape

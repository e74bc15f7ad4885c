"""The model's tensors on this rank, and their exchange between ranks by original name."""

from __future__ import annotations

import hashlib
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from autopart.ir.errors import RefusedError, UsageError
from autopart.runtime.group.world import World
from autopart.runtime.masters import Masters, needs_master

Values = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""Returns tensors with values for tensors on the meta device, by name (`like`)."""


def like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory on a device for what a tensor on the meta device stands for, with numbers of any kind."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


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
    Others are copied once, and keep their `requires_grad`.  What the model has on the meta device gets its value here,
    and has none in the model.
    """

    def __init__(
        self,
        device: torch.device,
        earlier: LocalTensors | None = None,
        mastered: Callable[[str], bool] = lambda _: False,
        values: Values = without_values,
    ) -> None:
        """earlier: what this rank held before, taken over as the same objects.  mastered: whether this rank has the
        master weight of a parameter in half precision.  values: of tensors on the meta device, until `settle`."""
        self._device = device
        self._held: dict[str, torch.Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._earlier = earlier
        self._mastered, self._values = mastered, values
        self.masters = Masters()

    def hold(self, names: Iterable[str], source: Mapping[str, torch.Tensor]) -> None:
        """Hold the named tensors that are not held yet."""
        earlier = self._earlier
        before = earlier.held if earlier is not None else {}
        fresh = [name for name in dict.fromkeys(names) if name not in self._held]
        unknown = {name: source[name] for name in fresh if name not in before and source[name].is_meta}
        given = self._values(unknown) if unknown else {}
        for name in fresh:
            found = before.get(name, given.get(name))
            held = self._held[name] = found if found is not None else self._placed(source[name])
            self._dtypes[name] = held.dtype
            known = earlier.masters if earlier is not None else Masters()
            if self._mastered(name) and (needs_master(held) or name in known.by_name):
                self.hold_master(name, known)

    def hold_master(self, name: str, known: Masters | None = None) -> None:
        """Make the master weight of a held parameter, or take it over from `known`."""
        held = self._held[name]
        assert isinstance(held, torch.nn.Parameter)
        self.masters.hold(name, held, known)

    def settle(self, values: Values = without_values) -> None:
        """Release what was held before and is not held any more.  values: of tensors on the meta device from now on,
        as training changes others."""
        self._earlier, self._values = None, values

    def check(self) -> None:
        """Raise RefusedError if a tensor was converted in place, as by model.to(dtype), or written to beside its
        master."""
        for name, tensor in self._held.items():
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
            held = self._held.get(name)
            if held is not None and held.requires_grad != parameter.requires_grad:
                held.requires_grad_(parameter.requires_grad)
            if held is not None and needs_master(held) and self._mastered(name) and name not in self.masters.by_name:
                raise RefusedError(
                    f"{name} is trained now, and was frozen when the model was compiled",
                    why="it has no master in fp32: optimizers made from pipe.parameters() would not see its gradient",
                    fix="keep requires_grad=True until compile; freeze it afterwards",
                )
        self.masters.follow()

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        copy = tensor.detach().to(self._device)
        return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """All held tensors."""
        return self._held

    @property
    def driven(self) -> Mapping[str, torch.Tensor]:
        """The held tensors, masters in place of the parameters that they round to: what gradients go to."""
        return {**self._held, **self.masters.by_name}


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a strided tensor of these numbers; gradients of embeddings with sparse=True are sparse."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def broadcast_weights_if_different(world: World, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights of rank 0 to every rank, as DistributedDataParallel does.  Collective.

    Hashes of their bytes are compared first, so nothing is sent if the ranks built the same model.
    """
    if world.size == 1:
        return
    names = sorted(name for name, tensor in tensors.items() if not tensor.is_meta)
    differing = [names[index] for index in _differing(world, [_hash(tensors[name]) for name in names])]
    if differing and world.rank == 0:
        warnings.warn(
            f"the ranks built different weights ({differing[0]} and {len(differing) - 1} more): those of rank 0 are "
            "used; seed the construction of the model alike on every rank to save sending them",
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


def _differing(world: World, hashes: Sequence[str]) -> list[int]:
    """Return the places where some rank's hash differs from rank 0's.  Collective; sends one hash if all are equal."""
    whole = hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
    if len(set(world.gather_objects(whole))) == 1:
        return []
    everyone = world.gather_objects(hashes)
    return [index for index, mine in enumerate(everyone[0]) if any(other[index] != mine for other in everyone)]


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()


def gather_tensors(
    world: World,
    owners: Mapping[str, int],
    like: Mapping[str, torch.Tensor],
    local: Callable[[str], torch.Tensor | None],
) -> dict[str, torch.Tensor | None]:
    """Return every named tensor, on every rank, on the CPU.  Collective.

    owners: the rank that has a tensor; like: a tensor of its shape and dtype; local: returns it on its owner, or None.
    Sparse tensors become dense.  Bytes sent: the size of all tensors, to every rank.
    """
    present = {name: local(name) is not None for name, rank in owners.items() if rank == world.rank}
    everyone = dict(ChainMap(*world.gather_objects(present)))
    result: dict[str, torch.Tensor | None] = {}
    for name, rank in owners.items():
        if not everyone[name]:
            result[name] = None
            continue
        mine = local(name) if rank == world.rank else None
        if mine is None:
            data = torch.empty(like[name].shape, dtype=like[name].dtype)
        else:
            data = dense(mine.detach()).cpu().clone()
        result[name] = world.broadcast(data.contiguous(), rank)
    return result

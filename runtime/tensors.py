"""The tensors of the model across ranks: which of them this rank holds, and all of them by original name on request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

import torch

from autopart.runtime.world import World


class LocalTensors:
    """This rank's parameters, buffers and constants by name, on its device.

    A tensor that is on the device already is the model's own object: an optimizer made for the model drives it.
    Another is copied once, and the copy keeps its `requires_grad`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, torch.Tensor] = {}

    def hold(self, names: Iterable[str], source: Mapping[str, torch.Tensor]) -> None:
        """Take what is named and not yet held."""
        for name in names:
            if name not in self._held:
                self._held[name] = self._placed(source[name])

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        copy = tensor.detach().to(self._device)
        return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """Everything this rank holds."""
        return self._held


def broadcast_weights_if_different(world: World, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make every rank's weights those of rank 0 (as DistributedDataParallel does).  Collective.

    Two sums per tensor are compared first, so that nothing is sent when the ranks built the same model.
    """
    if world.size == 1:
        return
    names = sorted(tensors)
    sums = [number for name in names for number in _sums(tensors[name])]
    everyone = world.gather_numbers(sums)
    differs = [
        name
        for i, name in enumerate(names)
        if any(repr(row[2 * i : 2 * i + 2]) != repr(everyone[0][2 * i : 2 * i + 2]) for row in everyone)
    ]
    if differs and world.rank == 0:
        warnings.warn(
            f"the ranks built different weights ({differs[0]} and {len(differs) - 1} more): those of rank 0 are used; "
            "seed the construction of the model alike on every rank to save sending them",
            stacklevel=2,
        )
    for name in differs:
        tensor = tensors[name]
        with torch.no_grad():
            tensor.copy_(world.broadcast(tensor.detach().cpu().contiguous(), 0))


def _sums(tensor: torch.Tensor) -> tuple[float, float]:
    numbers = tensor.detach().to(torch.float64) if not tensor.is_complex() else torch.view_as_real(tensor).double()
    return float(numbers.sum()), float(numbers.square().sum())


def gather_tensors(
    world: World,
    owners: Mapping[str, int],
    like: Mapping[str, torch.Tensor],
    local: Callable[[str], torch.Tensor | None],
) -> dict[str, torch.Tensor | None]:
    """Every named tensor, on every rank, on the CPU.  Collective.

    owners: the rank that has it; like: a tensor of its shape and dtype on every rank; local: on the owner, the tensor
    or None.  Bytes sent: the size of everything, to every rank.
    """
    present = {name: local(name) is not None for name, rank in owners.items() if rank == world.rank}
    everyone: dict[str, bool] = {}
    for rank in range(world.size):
        everyone.update(world.broadcast_json(present if rank == world.rank else None, rank))
    result: dict[str, torch.Tensor | None] = {}
    for name, rank in owners.items():
        if not everyone[name]:
            result[name] = None
            continue
        mine = local(name) if rank == world.rank else None
        data = torch.empty(like[name].shape, dtype=like[name].dtype) if mine is None else mine.detach().cpu().clone()
        result[name] = world.broadcast(data.contiguous(), rank)
    return result

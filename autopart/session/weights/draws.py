"""Watch the ops of an initialisation: random ones draw by key, and writes are noted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.ir.errors import RefusedError
from autopart.rng import keyed, micro_key


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which initialisations run.

    Random op number n in the initialisation of a module draws the numbers of (seed, name of the module, n).  Ops on the
    meta device count too, so the numbers do not depend on which tensors have memory here.

    written: names of the tensors of which some op has written all elements.
    """

    def __init__(self, seed: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: those whose writes are noted, by name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._count, self._module = seed, 0, ""
        self._by_storage = {t.untyped_storage()._cdata: (name, t.numel()) for name, t in tensors.items()}
        self.written = {name for name, tensor in tensors.items() if not tensor.numel()}

    @contextmanager
    def of_module(self, name: str) -> Iterator[None]:
        """Run the initialisation of a module inside."""
        self._count, self._module = 0, name
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        with torch.no_grad(), micro_key(self._seed, number, 0), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
                raise RefusedError(
                    f"the initialisation of {self._module or 'the model'} draws from a generator of its own",
                    why="its numbers depend on what was drawn before, which ranks do not share",
                    fix='leave generator= out: seed= of compile chooses the numbers of weights="init"',
                )
            self._count += 1
            result = keyed(func, self._count, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            name, size = self._by_storage.get(tensor.untyped_storage()._cdata, ("", 0))
            if name and tensor.numel() >= size:
                self.written.add(name)
        return result


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors that an op writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))

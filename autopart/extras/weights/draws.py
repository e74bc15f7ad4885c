"""Watch the ops of an initialisation: random ones draw by key, and writes are noted."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.ir.errors import RefusedError
from autopart.rng import keyed, micro_key

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which initialisations run.

    A random op draws the numbers of (seed, module whose initialisation runs, tensor of the model that was touched last,
    how many draws there were for it).  So the numbers of a tensor do not depend on which others have memory here, nor
    on how often an initialisation draws again for them, as that of truncated normals does.

    written: names of the tensors of which some op has written all elements.
    """

    def __init__(self, seed: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: all tensors of the model, by name."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._module, self._touched, self._counts = seed, "", "", Counter[str]()
        self._by_storage = {_storage(tensor): (name, tensor.numel()) for name, tensor in tensors.items()}
        self.written = {name for name, tensor in tensors.items() if not tensor.numel()}

    @contextmanager
    def of_module(self, name: str) -> Iterator[None]:
        """Run the initialisation of a module inside."""
        self._module, self._touched, self._counts = name, "", Counter()
        with torch.no_grad(), _Touches(self), self:
            yield

    def touch(self, func: Any, args: Iterable[Any]) -> None:
        """Note what a function of torch is called with."""
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and (name := self._by_storage.get(_storage(tensor), ("", 0))[0]):
                self._touched = name
                # Initialisations of torch that would ask for numbers end here for a tensor on the meta device.
                if func == _IS_META and sys._getframe(2).f_globals.get("__name__") == "torch.nn.init":
                    self.written |= {name} if tensor.is_meta else set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [(t, *self._by_storage.get(_storage(t), ("", 0))) for t in _written(func, args, kwargs)]
        self._touched = next((name for _, name, _ in written if name), self._touched)
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = self._drawn(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self.written |= {name for tensor, name, size in written if name and tensor.numel() >= size}
        return result

    def _drawn(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise RefusedError(
                f"the initialisation of {self._module or 'the model'} draws from a generator of its own",
                why="its numbers depend on what was drawn before, which ranks do not share",
                fix='leave generator= out: seed= of compile chooses the numbers of weights="init"',
            )
        self._counts[self._touched] += 1
        text = f"{self._module}\0{self._touched}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        with micro_key(self._seed, number, 0):
            return keyed(func, self._counts[self._touched], *args, **kwargs)


class _Touches(TorchFunctionMode):
    """Tells draws which tensors of the model the initialisation touches, also where it does nothing to them."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._draws.touch(func, args)
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors that an op writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor))

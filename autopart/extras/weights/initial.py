"""The model's own initialisation, run for some of its tensors while the others stay on the meta device.

For each module in the order of `torch.nn.Module.apply`, children first: its `reset_parameters()`, as its constructor
calls it, then `_init_weights(module)` of the nearest model around it that has this method, as transformers call it.  A
tensor is set by the initialisation of the module that has its first name, and of those around it; a tied one by that of
the source, where a model of transformers names it.  What a constructor does besides (a loop over the parameters in
`__init__`) is not known here.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.capture.python.guards import tied_names
from autopart.capture.trained import Trained
from autopart.files.reading import listed
from autopart.ir.errors import AutopartError, RefusedError
from autopart.rng import keyed, micro_key
from autopart.runtime.tensors import like

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


Method = Callable[[], Any]
_Initialiser = tuple[str, nn.Module, list[Method], nn.Module | None]
_META = torch.device("meta")
"""Where writes to a tensor go that keeps its value."""
_DONE = "_is_hf_initialized"
"""What transformers marks a module with whose initialisation has run; that of some modules around it asks for it."""


def initial_values(
    model: Trained, wanted: Mapping[str, torch.Tensor], seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return new tensors on a device with the values that the model's own initialisation gives these.

    wanted: tensors of the model by first name.  Random numbers follow from the seed and from names (`Draws`), so each
    tensor has the same value whatever else is wanted.  The model stays as it is.  Memory: of the tensors alone, but for
    what an initialisation needs for itself.  Raises RefusedError (`require_initialiser`).
    """
    homes, made = _homes(model, wanted), {name: like(tensor, device) for name, tensor in wanted.items()}
    placed = {homes[name]: tensor for name, tensor in made.items()}
    with _in_place(model, placed) as every:
        written = _run(model, placed, Draws(seed, every))
    _require_written(model, placed, written)
    return made


def require_initialiser(model: Trained, wanted: Mapping[str, torch.Tensor], seed: int) -> None:
    """Raise RefusedError for the first of these tensors that no initialisation of the model sets, without memory for
    them: the initialisation runs on the meta device."""
    homes = _homes(model, wanted)
    _require_written(model, homes.values(), _written_without_memory(model, wanted, homes, seed))


def require_no_leftovers(model: Trained, seed: int) -> None:
    """Raise RefusedError for a parameter with values that nobody has set.

    A model of transformers skips its initialisation where it is built on the meta device, and a constructor that makes
    memory on the CPU all the same, as by torch.FloatTensor, leaves what was in that memory."""
    inside = [f"{name}." if name else "" for name, module in model.named_modules() if _is_transformers(module)]
    left = {
        name: tensor
        for name, tensor in model.named_parameters()
        if not tensor.is_meta and not hasattr(tensor, "_is_hf_initialized") and name.startswith(tuple(inside))
    }
    homes = _homes(model, left)
    written = _written_without_memory(model, left, homes, seed) if left else set()
    if (first := next((name for name, home in homes.items() if home in written), None)) is not None:
        raise RefusedError(
            f"{first} has memory, and the initialisation that sets it has not run",
            why="a model of transformers that is built on the meta device skips it, and leaves what was in the memory",
            fix='model.to("meta") before compile, so that it gets its value as all others; to keep what it holds, set '
            "its attribute _is_hf_initialized = True, as transformers does",
        )


def _written_without_memory(
    model: Trained, wanted: Mapping[str, torch.Tensor], homes: Mapping[str, str], seed: int
) -> set[str]:
    shapes = {homes[name]: like(tensor, _META) for name, tensor in wanted.items()}
    with _in_place(model, shapes) as every:
        return _run(model, shapes, Draws(seed, every))


def _homes(model: Trained, names: Iterable[str]) -> dict[str, str]:
    """Return, for the first name of each of these tensors, the name in the module whose initialisation counts: that
    which a model of transformers calls the source of the tied ones, else the first."""
    homes, tied = {name: name for name in names}, tied_names(model)
    for path, module in model.named_modules():
        for target, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
            target, source = (f"{path}.{name}" if path else name for name in (target, source))
            first = tied.get(source, source)
            if first in homes and tied.get(target, target) == first:
                homes[first] = source
    return homes


def _is_transformers(module: object) -> bool:
    """Return whether a module is a model of transformers, which runs `_init_weights` once for each module in it."""
    return hasattr(module, "_initialize_weights")


def _run(model: Trained, tensors: Mapping[str, torch.Tensor], draws: Draws) -> set[str]:
    """Run the initialisation of every module that may set one of these tensors, which are in the model's place for
    them; returns the names of those that were set."""
    around = {"", *(name[:place] for name in tensors for place, sign in enumerate(name) if sign == ".")}
    marked: list[nn.Module] = []
    try:
        for name, module, methods, outer in _initialisers(model):
            for replaced, value in _called(draws, name, module, methods) if name in around else ():
                if replaced in tensors and tensors[replaced].shape == value.shape:
                    draws.written.add(replaced)
                    if not value.is_meta:
                        tensors[replaced].detach().copy_(value)
            if _is_transformers(outer) and not hasattr(module, _DONE):
                setattr(module, _DONE, True)
                marked.append(module)
    finally:
        for module in marked:
            delattr(module, _DONE)
    return draws.written


def _called(
    draws: Draws, name: str, module: nn.Module, methods: Iterable[Method]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Initialise a module, and leave its attributes as they were; yields the tensors that replaced its own."""
    attributes = dict(vars(module))
    registries: list[dict[str, Any]] = [module._parameters, module._buffers]
    before = [dict(registry) for registry in registries]
    try:
        with draws.of_module(name):
            for method in methods:
                method()
    except AutopartError:
        raise
    except Exception as error:  # the model's own code
        raise RefusedError(
            f"the initialisation of {name or 'the model'} ({type(module).__name__}) failed: {type(error).__name__}",
            why=str(error).splitlines()[0] if str(error) else "",
            fix="it runs with tensors that have no values; compute in it from sizes alone, or pass files as weights=",
        ) from error
    finally:
        vars(module).clear()
        vars(module).update(attributes)
        after = [dict(registry) for registry in registries]
        for registry, was in zip(registries, before, strict=True):
            registry.clear()
            registry.update(was)
    for was, now in zip(before, after, strict=True):
        for key, tensor in now.items():
            if tensor is not None and tensor is not was.get(key):
                yield f"{name}.{key}" if name else key, tensor


def _initialisers(model: Trained) -> Iterator[_Initialiser]:
    """Yield every module that has an initialisation, children first, by its first name, and the nearest model around it
    that initialises each module inside it."""
    seen = set[int]()

    def below(name: str, module: nn.Module, outer: nn.Module | None) -> Iterator[_Initialiser]:
        if id(module) in seen:
            return
        seen.add(id(module))
        known = _takes_modules(module, outer)
        outer = module if known else outer
        for key, child in module.named_children():
            yield from below(f"{name}.{key}" if name else key, child, outer)
        own = (getattr(module, method, None) for method in ("reset_parameters", "_reset_parameters"))
        found = next((method for method in own if inspect.ismethod(method) and _required(method) == 0), None)
        methods: list[Method] = [found] if found is not None else []
        if outer is not None:
            rule: Any = outer._init_weights
            methods.append(lambda: rule(module))
        if methods:
            yield name, module, methods, outer

    for prefix, part in model.parts():
        yield from below(prefix.removesuffix("."), part, None)


def _takes_modules(module: nn.Module, outer: nn.Module | None) -> bool:
    """Return whether a module has a method that initialises each module inside it.  Inside a model of transformers only
    other such models count."""
    method = getattr(module, "_init_weights", None)
    if not inspect.ismethod(method) or (_is_transformers(outer) and not _is_transformers(module)):
        return False
    return _required(method) == 1


def _required(method: Callable[..., Any]) -> int:
    """Return how many arguments a call has to give."""
    takes = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(each.kind in kinds and each.default is inspect.Parameter.empty for each in takes)


@contextmanager
def _in_place(model: Trained, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Put tensors into the model's places for them, and the meta device everywhere else; yields what is there."""
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    every = {name: tensors[name] if name in tensors else like(tensor, _META) for name, tensor in own}
    with model.holding(every):
        yield every


def _require_written(model: Trained, wanted: Iterable[str], written: set[str]) -> None:
    missing = [name for name in wanted if name not in written]
    if not missing:
        return
    first = missing[0]
    modules = dict(model.named_modules())
    home = modules[first.rpartition(".")[0]]
    raise RefusedError(
        f"{first} has no value, and no initialisation of the model sets it",
        where=f"module {first.rpartition('.')[0] or '(the model itself)'} ({type(home).__name__})",
        why=f"neither {type(home).__name__}.reset_parameters() nor an _init_weights(module) around it sets all of it"
        + (f"; the same holds for {len(missing)} tensors: {listed(missing)}" if len(missing) > 1 else ""),
        fix=f"give {type(home).__name__} a reset_parameters() that sets it, or build it with values: "
        'torch.arange(n, device="cpu"), or put them there later (module.bias = nn.Parameter(torch.zeros(n)), then '
        "model.tie_weights() if it is tied); a parameter, or a saved buffer, may also come from files (weights=)",
    )

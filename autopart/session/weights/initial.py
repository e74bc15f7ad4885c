"""The model's own initialisation, run for some of its tensors while the others stay on the meta device.

For each module in the order of `torch.nn.Module.apply`, children first: its `reset_parameters()`, as its constructor
calls it, then `_init_weights(module)` of the nearest model around it that has this method, as transformers call it.  A
tensor is set by the initialisation of the module that has its first name, and of those around it.  What a constructor
does besides (a loop over the parameters in `__init__`) is not known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopart.capture.guards import tied_names
from autopart.capture.trained import Trained
from autopart.files.reading import listed
from autopart.ir.errors import AutopartError, RefusedError
from autopart.runtime.tensors import like
from autopart.session.weights.draws import Draws

Method = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a module: registry[key]."""

    registry: dict[str, torch.Tensor | None]
    key: str
    name: str


def initial_values(
    model: Trained, wanted: Mapping[str, torch.Tensor], seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return new tensors on a device with the values that the model's own initialisation gives these.

    wanted: tensors of the model by first name.  Random numbers follow from the seed and from names (`Draws`), so each
    tensor has the same value whatever else is wanted.  The model stays as it is.  Memory: of the tensors alone, but for
    what an initialisation needs for itself.  Raises RefusedError (`require_initialiser`).
    """
    made = {name: like(tensor, device) for name, tensor in wanted.items()}
    with _in_place(model, made) as every:
        written = _run(model, made, Draws(seed, every))
    _require_written(model, wanted, written)
    return made


def require_initialiser(model: Trained, wanted: Mapping[str, torch.Tensor], seed: int) -> None:
    """Raise RefusedError for the first of these tensors that no initialisation of the model sets, without memory for
    them: the initialisation runs on the meta device."""
    shapes = {name: _decoy(tensor) for name, tensor in wanted.items()}
    with _in_place(model, shapes) as every:
        written = _run(model, shapes, Draws(seed, every))
    _require_written(model, wanted, written)


def _run(model: Trained, tensors: Mapping[str, torch.Tensor], draws: Draws) -> set[str]:
    """Run the initialisation of every module that may set one of these tensors, which are in the model's place for
    them; returns the names of those that were set."""
    around = {"", *(name[:place] for name in tensors for place, sign in enumerate(name) if sign == ".")}
    for name, module, methods in _initialisers(model):
        if name in around:
            for replaced, value in _called(draws, name, module, methods):
                if replaced in tensors and tensors[replaced].shape == value.shape:
                    draws.written.add(replaced)
                    if not value.is_meta:
                        tensors[replaced].detach().copy_(value)
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


def _initialisers(model: Trained) -> Iterator[tuple[str, nn.Module, list[Method]]]:
    """Yield every module that has an initialisation, children first, by its first name."""
    seen = set[int]()

    def below(name: str, module: nn.Module, outer: nn.Module | None) -> Iterator[tuple[str, nn.Module, list[Method]]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        known = _takes_modules(module, outer)
        outer = module if known else outer
        for key, child in module.named_children():
            yield from below(f"{name}.{key}" if name else key, child, outer)
        methods = [method for method in (_own_method(module),) if method is not None]
        if outer is not None:
            rule: Any = outer._init_weights
            methods.append(lambda: rule(module))
        if methods:
            yield name, module, methods

    for prefix, part in model.parts():
        yield from below(prefix.removesuffix("."), part, None)


def _takes_modules(module: nn.Module, outer: nn.Module | None) -> bool:
    """Return whether a module has a method that initialises each module inside it.  Inside a model of transformers only
    other such models count."""
    method = getattr(module, "_init_weights", None)
    if not inspect.ismethod(method) or (
        hasattr(outer, "_initialize_weights") and not hasattr(module, "_initialize_weights")
    ):
        return False
    return _required(method) == 1


def _own_method(module: nn.Module) -> Method | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if inspect.ismethod(method) and _required(method) == 0:
            return method
    return None


def _required(method: Callable[..., Any]) -> int:
    """Return how many arguments a call has to give."""
    takes = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return sum(each.kind in kinds and each.default is inspect.Parameter.empty for each in takes)


@contextmanager
def _in_place(model: Trained, tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Put tensors into the model's places for them, and the meta device everywhere else; yields what is there."""
    before = [(place, place.registry[place.key]) for place in _places(model)]
    tied, every = tied_names(model), dict[str, torch.Tensor]()
    try:
        for place, own in before:
            assert own is not None
            first = place.name not in tied and place.name in tensors
            every[place.name] = place.registry[place.key] = tensors[place.name] if first else _decoy(own)
        yield every
    finally:
        for place, own in before:
            place.registry[place.key] = own


def _decoy(tensor: torch.Tensor) -> torch.Tensor:
    """Return what takes the writes to a tensor that keeps its value."""
    return like(tensor, torch.device("meta"))


def _places(model: Trained) -> Iterator[_Place]:
    for name, module in model.named_modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for registry in registries:
            for key, tensor in registry.items():
                if tensor is not None:
                    yield _Place(registry, key, f"{name}.{key}" if name else key)


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
        'torch.arange(n, device="cpu"); a parameter, or a buffer that is saved, may also come from files (weights=)',
    )

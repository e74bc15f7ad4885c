"""Everything that a step trains: the tensors of the model, and under `loss_fn.` those of a loss function."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopart.ir.errors import UsageError

PREFIX = "loss_fn."


class Trained:
    """A model and a loss function that has parameters, as one set of named tensors.

    A loss function without parameters is left out, with its buffers.  Raises UsageError if names collide.
    """

    def __init__(self, model: nn.Module, loss_fn: object = None) -> None:
        self.model = model
        learns = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters())
        self.loss_fn = loss_fn if learns and isinstance(loss_fn, nn.Module) else None
        if self.loss_fn is not None and PREFIX[:-1] in {**dict(model.named_children()), **vars(model)}:
            raise UsageError(
                "the model has a module loss_fn, and the loss function has parameters",
                why="the names of both would begin with loss_fn",
                fix="give that module of the model another name",
            )

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter; of tied ones only the first, unless duplicates are wanted."""
        yield from self._named(lambda module: module.named_parameters(remove_duplicate=False), remove_duplicate)

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every buffer; of tied ones only the first, unless duplicates are wanted."""
        yield from self._named(lambda module: module.named_buffers(remove_duplicate=False), remove_duplicate)

    def _named(self, of: Callable[[nn.Module], Iterable[tuple[str, Any]]], once: bool) -> Iterator[tuple[str, Any]]:
        seen = set[int]()
        for prefix, module in self.parts():
            for name, tensor in of(module):
                if not (once and id(tensor) in seen):
                    yield prefix + name, tensor
                seen.add(id(tensor))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every parameter and every buffer that is saved, under each of its names, whatever the model's own
        `state_dict` makes of them."""
        return {
            f"{prefix}{path}.{name}" if path else prefix + name: tensor
            for prefix, part in self.parts()
            for path, module in part.named_modules(remove_duplicate=False)
            for name, tensor in itertools.chain(
                module.named_parameters(recurse=False, remove_duplicate=False),
                module.named_buffers(recurse=False, remove_duplicate=False),
            )
            if name not in module._non_persistent_buffers_set
        }

    def stateful(self) -> dict[str, nn.Module]:
        """Return the modules that have extra state, by name."""
        return {name: m for name, m in self.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return what the model's own `state_dict` makes of its values, and that of the loss function."""
        own = self.model.state_dict()
        found = OrderedDict(own)
        found._metadata = dict(getattr(own, "_metadata", {}))  # type: ignore[attr-defined]
        for name, value in self.loss_fn.state_dict().items() if self.loss_fn is not None else ():
            found[PREFIX + name] = value
        return found

    def load_state_dict(self, state: Mapping[str, Any], **how: bool) -> tuple[list[str], list[str]]:
        """Load what `state_dict` returned through the model's own `load_state_dict`; returns what is missing and what
        is unexpected there.  how: `strict` and `assign`, as in torch."""
        wrong: tuple[list[str], list[str]] = [], []
        for prefix, part in self.parts():
            own = OrderedDict(
                (name.removeprefix(prefix), value)
                for name, value in state.items()
                if (self.loss_fn is not None and name.startswith(PREFIX)) == bool(prefix)
            )
            own._metadata = None if prefix else getattr(state, "_metadata", None)  # type: ignore[attr-defined]
            for names, more in zip(wrong, part.load_state_dict(own, **how) or ((), ()), strict=True):
                names.extend(prefix + name for name in more)
        return wrong

    def own_loading(self) -> str:
        """Return the name of the first module whose loading is its own, by a hook or by a method, "" if none: what it
        loads may have other names or values than its parameters.  Torch's own modules and hooks do not count."""
        methods = "load_state_dict", "_load_from_state_dict"
        for name, module in self.named_modules():
            hooks = *module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()
            found = [getattr(hook, "hook", hook) for hook in hooks] + [getattr(type(module), each) for each in methods]
            if any(not str(getattr(each, "__module__", "")).startswith("torch.") for each in found):
                return name or type(module).__name__
        return ""

    def own_loading_changes(self) -> str:
        """Return what `own_loading` does if that loading does anything but put what it is given under a name into the
        tensor of that name.  It runs for tensors without memory; hooks that run after it count as a change."""
        first = self.own_loading()
        after = [hook for _, module in self.named_modules() for hook in module._load_state_dict_post_hooks.values()]
        if not first or after:
            return first
        own = self.tensors()
        stands = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in own.values()}
        given = {name: stands[id(tensor)] for name, tensor in own.items()}
        with self.holding({name: torch.empty_like(tensor) for name, tensor in given.items()}):
            try:
                self.load_state_dict(given, strict=False, assign=True)
            except Exception:  # of the model's own code, which asks for other names
                return first
            found = self.tensors()
        return "" if all(_memory(found[name]) == _memory(tensor) for name, tensor in given.items()) else first

    @contextmanager
    def holding(
        self, tensors: Mapping[str, torch.Tensor], states: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[None]:
        """Have other values in the model's places inside: tensors by name, and extra state by module."""
        modules = dict(self.named_modules())
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        for path, module in modules.items():
            registries: list[dict[str, Any]] = [module._parameters, module._buffers]
            for registry, (key, own) in [(each, pair) for each in registries for pair in each.items()]:
                value = tensors.get(f"{path}.{key}" if path else key)
                if own is not None and value is not None and value is not own:
                    replaced.append((registry, key, own))
                    registry[key] = _in_place_of(own, value)
        try:
            for name, state in states.items():
                vars(modules[name])["get_extra_state"] = lambda state=state: state
            yield
        finally:
            for registry, key, own in replaced:
                registry[key] = own
            for name in states:
                del vars(modules[name])["get_extra_state"]

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module under its name, the model itself under the empty one."""
        for prefix, module in self.parts():
            for name, inner in module.named_modules():
                yield f"{prefix}{name}" if name else prefix.removesuffix("."), inner

    @property
    def without_values(self) -> str:
        """The name of the first tensor that is on the meta device, "" if all have values."""
        return next((prefix + name for prefix, part in self.parts() if (name := on_meta([part]))), "")

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model and the loss function, each with the prefix of its names."""
        yield "", self.model
        if self.loss_fn is not None:
            yield PREFIX, self.loss_fn


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, tensor._version


def _in_place_of(own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as the kind of tensor that a module has there, with what its class or its user attached to it."""
    if type(value) is type(own):
        return value
    made = value.detach().as_subclass(type(own)).requires_grad_(own.requires_grad)
    vars(made).update(vars(own))
    return made


def on_meta(modules: Iterable[nn.Module]) -> str:
    """Return the name of the first parameter or buffer that is on the meta device and so has no values, "" if none."""
    for module in modules:
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if tensor.is_meta:
                return name
    return ""

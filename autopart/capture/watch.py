"""Whether a model is still what was captured: asked before every step, so it has to be quick.

Watched are what requires a gradient, hooks, which parameters, buffers and modules there are, which function is each
forward(), and of the rest of Python what forward() read while it was traced (`observed`): attributes, training flags,
the order of modules, and names and cells of the functions that ran.  What captures freeze is captured anew; what no
capture can mend is refused.
"""

from __future__ import annotations

import itertools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopart.capture.fingerprint import containers, described, has_state
from autopart.capture.guards import check_hooks
from autopart.capture.snapshot import ABSENT, Snapshot
from autopart.capture.surroundings import Attribute, Reading, surroundings
from autopart.capture.trained import Trained
from autopart.ir.errors import RefusedError

_requires_grad = operator.attrgetter("requires_grad")
_training = operator.itemgetter("training")


class Watch:
    """A model, and the Python around it, as they stand now."""

    def __init__(
        self,
        model: nn.Module,
        reads: Iterable[tuple[nn.Module, str]],
        ordered: Set[nn.Module],
        functions: Iterable[Any],
        flags: Mapping[nn.Module, bool],
    ) -> None:
        """reads: attributes that forward() read; ordered: modules whose tensors or modules it went through in their
        order; functions: others that ran, such as the loss; flags: the training flags that it read, as they were when
        a training step was last captured, none when none was: evaluation sets its own."""
        self._model = model
        self._names = {id(module): path for path, module in model.named_modules()}
        self._flags = {module: flag for module, flag in flags.items() if "training" in vars(module)}
        self._on = [vars(module) for module, flag in self._flags.items() if flag]
        self._off = [vars(module) for module, flag in self._flags.items() if not flag]
        modules = list(model.modules())
        self._orders = {module: _order(module) for module in modules if module in ordered}
        self._parameters = list(model.parameters())
        self._tensors = tensors_of(model)
        classes = list(dict.fromkeys(map(type, modules)))
        self._patches = [Reading(vars(module), "forward", _place(self._names, module, "forward")) for module in modules]
        places = {module: place for place, module in enumerate(modules)}
        listed = sorted(reads, key=lambda read: (places.get(read[0], len(places)), read[1]))  # near in memory: quicker
        attributes = [Attribute(module, name, _place(self._names, module, name)) for module, name in listed]
        self._readings: list[Reading] = [
            *(Reading(kind, "forward", f"{kind.__name__}.forward") for kind in classes),
            *surroundings([*classes, *functions, *(r.value for r in (*self._patches, *attributes))]),
            *attributes,
        ]
        self._grads = list(map(_requires_grad, self._parameters))
        self._trained = list(filter(_requires_grad, self._parameters))
        self._frozen = list(itertools.filterfalse(_requires_grad, self._parameters))
        self._hooks = RemovableHandle.next_id
        self._snapshot = self._taken(modules)

    def changes(self, *, training: bool) -> list[str]:
        """What is other than when this watch was made, in words; [] as long as nothing is.

        training: whether training flags count.  Raises RefusedError for a hook, and for a parameter or buffer that is
        another object.  O(modules + parameters + attributes read): some 0.2 ms for 1,000 modules.
        """
        if RemovableHandle.next_id != self._hooks:  # torch counts every hook that is registered anywhere
            check_hooks(self._model)
            self._hooks = RemovableHandle.next_id
        if (
            all(map(_requires_grad, self._trained))
            and not any(map(_requires_grad, self._frozen))
            and self._snapshot.holds()
            and (not training or (all(map(_training, self._on)) and not any(map(_training, self._off))))
        ):
            return []
        check_tensors(self._model, self._tensors)
        told = list(self._told(self._flags if training else {}))
        if not told:  # other objects of the same value
            self._snapshot = self._taken(list(self._model.modules()))
        return told

    def _taken(self, modules: Sequence[nn.Module]) -> Snapshot:
        """What is compared at every step."""
        wholes: list[Any] = [registry for module in modules for registry in _registries(module)]
        keys = [(reading.home, reading.name) for reading in self._patches]
        attributes: list[tuple[Any, str]] = []
        states: list[Callable[[], bool]] = []
        for reading in self._readings:
            value, cell = reading.now(), isinstance(reading.home, types.CellType)
            wholes.extend(containers(value))
            if isinstance(reading.home, dict):
                keys.append((reading.home, reading.name))
                if isinstance(reading, Attribute) and reading.name not in reading.home:
                    attributes.append((reading.kind, reading.name))
            elif value is not ABSENT and not isinstance(value, types.MethodType):  # a method is made anew at each look
                attributes.append((reading.home, reading.name))
            if has_state(value) or (value is ABSENT and cell) or isinstance(value, types.MethodType):
                states.append(reading.same)
        unordered = [registry for module in modules if module not in self._orders for registry in _registries(module)]
        return Snapshot(wholes, unordered, keys, attributes, states)

    def _told(self, flags: Mapping[nn.Module, bool]) -> Iterator[str]:
        modules = dict(self._model.named_modules())
        for path, module in modules.items():
            if self._names.get(id(module)) != path:
                yield f"{path or 'the model'} is another {type(module).__name__}"
            elif module in self._orders and self._orders[module] != (now := _order(module)):
                yield f"the order in {path or 'the model'} is {', '.join(name for names in now for name in names)}"
        for module, flag in flags.items():
            if module.training != flag:
                path = self._names.get(id(module), type(module).__name__) or "the model"
                yield f"{path}.training is {module.training}"
        yield from (f"{path} is gone" for path in self._names.values() if path not in modules)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for parameter, before in zip(self._parameters, self._grads, strict=True):
            if parameter.requires_grad != before:
                yield f"{names.get(id(parameter), 'a parameter')}.requires_grad is {parameter.requires_grad}"
        for reading in (*self._patches, *self._readings):
            if reading.changed():
                yield f"{reading.place} was {described(reading.value)} and is {described(reading.now())}"


def check_tensors(model: nn.Module | Trained, before: Mapping[str, tuple[str, torch.Tensor]]) -> None:
    """Raises RefusedError when the model has other parameters or buffers than `tensors_of` found before.  O(them)."""
    found = tensors_of(model)
    for name, (kind, tensor) in found.items():
        if name not in before or before[name][1] is not tensor:
            became = "replaced" if name in before else "added"
            raise RefusedError(
                f"{kind} {name} was {became} after the model was compiled",
                why="the pipeline, and the optimizer made for it, hold what was there before",
                fix="change its values in place (parameter.data.copy_(...), pipe.load_state_dict(...)), or "
                "close the pipe and compile the model anew",
            )
    for name, (kind, _) in before.items():
        if name not in found:
            raise RefusedError(
                f"{kind} {name} was removed after the model was compiled",
                why="the pipeline, and the optimizer made for it, still hold it",
                fix="close the pipe and compile the model anew",
            )


def tensors_of(model: nn.Module | Trained) -> dict[str, tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names, with which of the two each is."""
    named = {name: ("parameter", tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    return {**named, **{name: ("buffer", tensor) for name, tensor in model.named_buffers(remove_duplicate=False)}}


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _order(module: nn.Module) -> list[list[str]]:
    """The names of its tensors and modules as they come."""
    return [list(registry) for registry in _registries(module)]


def _place(names: Mapping[int, str], module: nn.Module, name: str) -> str:
    path = names.get(id(module), type(module).__name__)
    return f"{path}.{name}" if path else name

"""Whether a model is still what was captured: asked before every step, so it has to be quick.

Watched are the training flags, what requires a gradient, hooks, which parameters, buffers and modules there are, which
function is each forward(), and of the rest of Python what forward() read while it was traced (`observed`): attributes,
and names and cells of the functions that ran.  What captures freeze is captured anew; what no capture can mend is
refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from autopart.capture.fingerprint import described, is_plain
from autopart.capture.guards import check_hooks
from autopart.capture.surroundings import Attribute, Reading, surroundings
from autopart.ir.errors import RefusedError

_END = (object(),)
_FORWARD = repeat("forward")
_requires_grad = operator.attrgetter("requires_grad")


class Watch:
    """A model, and the Python around it, as they stand now."""

    def __init__(
        self,
        model: nn.Module,
        reads: Iterable[tuple[nn.Module, str]],
        functions: Iterable[Any],
        flags: Sequence[bool] | None,
    ) -> None:
        """reads: attributes that forward() read; functions: others that ran, such as the loss; flags: the training
        flags of all modules when a training step was last captured, None when none was: evaluation sets its own."""
        self._model = model
        self._names = {id(module): path for path, module in model.named_modules()}
        modules = list(model.modules())
        self._held = [vars(module) for module in modules]
        self._parts = [d for module in modules for d in _registries(module) if d]
        self._parameters = list(model.parameters())
        self._classes: list[Any] = list(dict.fromkeys(map(type, modules)))
        self._readings: list[Reading] = surroundings([*_mro(self._classes), *functions])
        self._readings += [Attribute(module, name, _place(self._names, module, name)) for module, name in reads]
        quick = {id(r): is_plain(r.value) and not (isinstance(r, Attribute) and r.inherited) for r in self._readings}
        plain = [reading for reading in self._readings if quick[id(reading)]]
        self._plain_homes = [reading.home for reading in plain]
        self._plain_names = [reading.name for reading in plain]
        self._deep = [reading for reading in self._readings if not quick[id(reading)]]
        self._flags = flags
        self._views = [parts.values() for parts in self._parts]
        self._things = [*chain.from_iterable(self._views), *_END]
        self._grads = list(map(_requires_grad, self._parameters))
        self._forwards = [kind.forward for kind in self._classes]
        self._patches = list(map(dict.get, self._held, _FORWARD))
        self._plain = list(map(dict.get, self._plain_homes, self._plain_names))
        self._hooks = RemovableHandle.next_id

    def changes(self, *, training: bool) -> list[str]:
        """What is other than when this watch was made, in words; [] as long as nothing is.

        training: whether training flags count.  Raises RefusedError for a hook, and for a parameter or buffer that is
        another object.  O(modules + parameters + attributes read): some 0.5 ms for 1,000 modules.
        """
        if RemovableHandle.next_id != self._hooks:  # torch counts every hook that is registered anywhere
            check_hooks(self._model)
            self._hooks = RemovableHandle.next_id
        flags = self._flags if training else None
        same = (
            (flags is None or [held["training"] for held in self._held] == flags)
            and all(map(operator.is_, chain(chain.from_iterable(self._views), _END), self._things))
            and list(map(_requires_grad, self._parameters)) == self._grads
            and [kind.forward for kind in self._classes] == self._forwards
            and list(map(dict.get, self._held, _FORWARD)) == self._patches
            and list(map(dict.get, self._plain_homes, self._plain_names)) == self._plain
            and not any(reading.changed() for reading in self._deep)
        )
        return [] if same else list(self._told(flags)) or ["something that forward() read"]

    def _told(self, flags: Sequence[bool] | None) -> Iterator[str]:
        self._refuse_other_tensors()
        modules = dict(self._model.named_modules())
        for place, (path, module) in enumerate(modules.items()):
            if self._names.get(id(module)) != path:
                yield f"{path or 'the model'} is another {type(module).__name__}"
            elif flags is not None and place < len(flags) and module.training != flags[place]:
                yield f"{path or 'the model'}.training is {module.training}"
        for (name, parameter), before in zip(self._model.named_parameters(), self._grads, strict=True):
            if parameter.requires_grad != before:
                yield f"{name}.requires_grad is {parameter.requires_grad}"
        for kind, forward in zip(self._classes, self._forwards, strict=True):
            if kind.forward is not forward:
                yield f"{kind.__name__}.forward is another function"
        for held, patch in zip(self._held, self._patches, strict=True):
            if held.get("forward") is not patch:
                yield "a module's forward is another function"
        for reading in self._readings:
            if reading.changed():
                yield f"{reading.place} was {described(reading.value)} and is {described(reading.now())}"

    def _refuse_other_tensors(self) -> None:
        known = {id(thing) for thing in self._things}
        for kind, named in (("parameter", self._model.named_parameters()), ("buffer", self._model.named_buffers())):
            for name, tensor in named:
                if id(tensor) not in known:
                    raise RefusedError(
                        f"{kind} {name} was replaced after the model was compiled",
                        why="the pipeline, and the optimizer made for it, hold the earlier one",
                        fix="change its values in place (parameter.data.copy_(...), pipe.load_state_dict(...)), or "
                        "close the pipe and compile the model anew",
                    )
        if len(self._parameters) != sum(1 for _ in self._model.parameters()):
            raise RefusedError(
                "parameters were removed from the model after it was compiled",
                why="the pipeline, and the optimizer made for it, still hold them",
                fix="close the pipe and compile the model anew",
            )


def _mro(classes: Iterable[type]) -> list[type]:
    """The classes and those that they derive from."""
    return list(dict.fromkeys(base for kind in classes for base in kind.__mro__))


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _place(names: Mapping[int, str], module: nn.Module, name: str) -> str:
    path = names.get(id(module), type(module).__name__)
    return f"{path}.{name}" if path else name

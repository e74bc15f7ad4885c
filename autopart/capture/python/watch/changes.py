"""Whether a model is still the one that was captured.  This is checked before every step, so it has to be quick.

Compared are all readings (`observed`), the parameters, buffers and modules, what requires a gradient, the training
flags that were read, and hooks.  After a change the model is captured again; a change that no capture can follow is
refused.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopart.capture.python.guards import check_hooks
from autopart.capture.python.watch.closure_reads import WHOLE, Reading
from autopart.capture.python.watch.fingerprint import ABSENT, containers, described, numbers_of
from autopart.capture.python.watch.observed import Observed
from autopart.capture.trained import Trained
from autopart.ir.errors import RefusedError

_requires_grad = operator.attrgetter("requires_grad")
_training = operator.itemgetter("training")


class ModelWatch:
    """A model, and the Python around it, as they are when this is made."""

    def __init__(self, model: nn.Module, observed: Observed, flags: Mapping[nn.Module, bool]) -> None:
        """flags: the training flags that forward() read, from the last capture of a training step."""
        self._model = model
        self._names = {id(module): path for path, module in model.named_modules()}
        self._flags = {module: flag for module, flag in flags.items() if "training" in vars(module)}
        self._flagged = list(map(vars, self._flags))
        self._orders = {module: _order(module) for module in model.modules() if module in observed.order}
        self._parameters = list(model.parameters())
        self._tensors = tensors_of(model)
        readings = map(replace, observed.readings.values())  # with the values that they have now
        self._readings: list[Reading] = sorted(readings, key=lambda reading: reading.place)
        self._numbers = [(tensor, numbers_of(tensor)) for tensor in observed.numbers.values()]
        self._grads = list(map(_requires_grad, self._parameters))
        self._hooks, self._default_dtype = RemovableHandle.next_id, torch.get_default_dtype()
        self._same = self._snapshot()

    def changes(self, *, training: bool) -> list[str]:
        """Return what changed since this was made, in words.

        training: whether training flags count.  Raises RefusedError for a hook, and for a parameter or buffer that is
        another object.  O(modules + parameters + attributes read): some 0.2 ms for 1,000 modules.
        """
        if RemovableHandle.next_id != self._hooks:  # torch counts every hook that is registered anywhere
            check_hooks(self._model)
            self._hooks = RemovableHandle.next_id
        if torch.get_default_dtype() is not self._default_dtype:
            return [f"the default dtype became {torch.get_default_dtype()}"]
        if (
            list(map(_requires_grad, self._parameters)) == self._grads
            and self._same()
            and (not training or list(map(_training, self._flagged)) == list(self._flags.values()))
        ):
            return []
        check_tensors(self._model, self._tensors)
        told = list(self._told(self._flags if training else {}))
        if not told:  # other objects of the same value
            self._same = self._snapshot()
        return told

    def _snapshot(self) -> Callable[[], bool]:
        """Return a quick test of whether everything holds the very same objects as now.

        An equal number that was assigned is another object: `_told` looks closer then.
        """
        wholes: list[Any] = [registry for module in self._model.modules() for registry in _registries(module)]
        lookups: list[tuple[Callable[..., Any], Any, str]] = []
        states: list[Callable[[], bool]] = []
        for reading in self._readings:
            value, home = reading.now(), reading.home
            inside, may_change = containers(value)
            wholes.extend(inside)
            cell = value is ABSENT and isinstance(home, types.CellType)
            remade = isinstance(value, types.MethodType) or reading.name == WHOLE  # another object at each look
            if isinstance(home, dict):
                lookups.append((dict.get, home, reading.name))
                if reading.owner is not None and reading.name not in home and not remade:
                    lookups.append((getattr, type(reading.owner), reading.name))
            elif not (cell or remade):
                lookups.append((getattr, home, reading.name))
            if may_change or cell or remade:
                states.append(reading.changed)
        states.append(lambda: any(numbers_of(tensor) != before for tensor, before in self._numbers))
        return _same_objects(wholes, lookups, states)

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
        for reading in self._readings:
            if reading.changed():
                yield f"{reading.place} was {described(reading.value)} and is {described(reading.now())}"
        for tensor, was in self._numbers:
            if numbers_of(tensor) != was:
                where = (reading.place for reading in self._readings if reading.now() is tensor)
                yield f"the numbers in {next(where, described(tensor))} changed"


def _same_objects(
    wholes: Iterable[Any],
    lookups: Iterable[tuple[Callable[..., Any], Any, str]],
    states: Sequence[Callable[[], bool]],
) -> Callable[[], bool]:
    """Return a test of whether containers and looked up names hold the same objects as now.

    states: return whether something changed that identity does not show.  The test runs in a few loops of C, some 30 ns
    for each entry.  Compared objects are kept alive, so that no other object can have their identity.
    """
    unique = list({id(whole): whole for whole in wholes}.values())
    empty = [whole for whole in unique if not whole]
    full = [whole for whole in unique if whole]
    views = [*(w.values() if isinstance(w, dict) else w for w in full), *(w for w in full if isinstance(w, dict))]
    lengths, held = list(map(len, views)), list(chain.from_iterable(views))
    listed = list({(id(home), name, how): (how, home, name) for how, home, name in lookups}.values())
    columns = [list(column) for column in zip(*listed, strict=True)] or [[], [], []]
    found = list(map(operator.call, *columns, repeat(ABSENT)))

    def same() -> bool:
        try:
            return bool(
                not any(empty)
                and list(map(len, views)) == lengths
                and all(map(operator.is_, chain.from_iterable(views), held))
                and all(map(operator.is_, map(operator.call, *columns, repeat(ABSENT)), found))
                and not any(changed() for changed in states)
            )
        except Exception:  # a variable that is not assigned any more, a dictionary that changed meanwhile
            return False

    return same


def check_tensors(model: nn.Module | Trained, before: Mapping[str, tuple[str, torch.Tensor]]) -> None:
    """Raise RefusedError if the model has other parameters or buffers than `tensors_of` found before."""
    found = tensors_of(model)
    for name, (kind, tensor) in found.items():
        if name not in before or before[name][1] is not tensor:
            became = "replaced" if name in before else "added"
            raise RefusedError(
                f"{kind} {name} was {became} after the model was compiled",
                why="the pipeline, and the optimizer made for it, hold what was there before",
                fix="change its values in place (parameter.copy_(...) under no_grad, pipe.load_state_dict(...)), or "
                "close the pipe and compile the model again",
            )
    for name, (kind, _) in before.items():
        if name not in found:
            raise RefusedError(
                f"{kind} {name} was removed after the model was compiled",
                why="the pipeline, and the optimizer made for it, still hold it",
                fix="close the pipe and compile the model again",
            )


def tensors_of(model: nn.Module | Trained) -> dict[str, tuple[str, torch.Tensor]]:
    """Return parameters and buffers under all their names, each with its kind."""
    named = {name: ("parameter", tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    return {**named, **{name: ("buffer", tensor) for name, tensor in model.named_buffers(remove_duplicate=False)}}


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _order(module: nn.Module) -> list[list[str]]:
    """Return the names of a module's tensors and modules in their order."""
    return [list(registry) for registry in _registries(module)]

"""What gives values to a model on the meta device, as weights= says; checked before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopart.capture.python.guards import tied_names
from autopart.capture.trained import Trained
from autopart.extras.weights.initial import initial_values, require_initialiser, require_no_leftovers
from autopart.extras.weights.stored import StoredValues
from autopart.ir.errors import RefusedError, UsageError
from autopart.runtime.tensors import without_values

INITIAL = "init"
"""The value of weights= for the model's own initialisation."""


class Weights:
    """Values for the tensors of a model that are on the meta device.

    Those that a state_dict has come from files, or from the model's own initialisation; a buffer that is not saved gets
    the value that its module gives it (`initial_values`)."""

    def __init__(self, model: Trained, weights: str, seed: int) -> None:
        """Check that there is a value for every tensor.  Reads headers of files, and runs initialisations without
        memory.  Raises CheckpointError and RefusedError, which name the tensor."""
        _require_registered(model)
        self._model, self._seed = model, seed
        every = {name: t for pairs in (model.named_parameters(), model.named_buffers()) for name, t in pairs}
        self.wanted = {name: tensor for name, tensor in every.items() if tensor.is_meta}
        self._stored = StoredValues(weights) if weights != INITIAL else None
        if self._stored is not None and not self._stored.by_own_names and (first := model.own_loading_changes()):
            raise RefusedError(
                f"the weights in {weights} would not go through the loading of the model",
                where=f"module {first}",
                why="a hook or a method of it changes what load_state_dict is given, and needs the whole state; each "
                "rank reads only the tensors that it holds",
                fix="load them into a model with values (model.load_state_dict), and write that with "
                "autopart.save_from(model, folder), by the names of its parameters; then pass weights=folder",
            )
        tied, state = tied_names(model), model.tensors()
        self._saved = saved = {tied.get(name, name) for name in state}
        self._made_here = {name for name in self.wanted if self._stored is None or name not in saved}
        require_no_leftovers(model, seed)
        require_initialiser(model, {name: self.wanted[name] for name in self.wanted if name in self._made_here}, seed)
        if self._stored is not None:
            names: dict[str, list[str]] = {}
            for name in [*every, *tied]:
                names.setdefault(tied.get(name, name), []).append(name)
            self._stored.require({n: t for n, t in self.wanted.items() if n not in self._made_here}, names)

    def values(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return new tensors on a device with the values of these, which are some of `wanted`."""
        own = {name: tensor for name, tensor in wanted.items() if name in self._made_here}
        made = initial_values(self._model, own, self._seed, device) if own else {}
        if self._stored is not None:
            made |= self._stored.values({n: t for n, t in wanted.items() if n not in own}, device)
        return made

    def unsaved(self, wanted: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, torch.Tensor]:
        """Return what `values` does, after training has begun: for buffers that are not saved.  Raises RefusedError for
        other tensors, which a step or a checkpoint may have changed."""
        changing = {name: tensor for name, tensor in wanted.items() if name in self._saved}
        return without_values(changing) if changing else self.values(wanted, device)


def _require_registered(model: Trained) -> None:
    """Raise RefusedError for a tensor on the meta device that no list of the model has."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise RefusedError(
                    f"{name}.{key} is a tensor on the meta device, and neither a parameter nor a buffer".removeprefix(
                        "."
                    ),
                    why="nothing says what its value is",
                    fix=f'build it with values (device="cpu"), or register_buffer("{key}", ...) and set it in '
                    f"{type(module).__name__}.reset_parameters()",
                )


def weights_for(model: Trained, weights: str | None, seed: int) -> Weights | None:
    """Return what gives a model its values, None if it has them.

    Raises UsageError where weights= and the model do not go together, and what `Weights` raises."""
    first = model.without_values
    if first and weights is None:
        raise UsageError(
            f"{first} is on the meta device: it has no values to train",
            fix='pass weights=: a safetensors file, a folder or a checkpoint, or "init" for the model\'s own '
            "initialisation; or build the model with values; autopart.plan needs none",
        )
    if weights is not None and not first:
        raise UsageError(
            "weights= is given, and the model has values already",
            why="it gives values to a model that was built on the meta device",
            fix='leave weights= out, or build the model inside `with torch.device("meta"):`',
        )
    return Weights(model, weights, seed) if weights is not None else None

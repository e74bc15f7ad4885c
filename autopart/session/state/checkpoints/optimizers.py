"""The state of a torch optimizer by the names of the parameters, independent of ranks and plans.

A torch optimizer numbers its parameters, so its own state_dict means something else on every rank and under every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopart.files.checkpoints.document import Group, OptimizerState
from autopart.files.checkpoints.values import decoded, encoded
from autopart.ir.errors import CheckpointError
from autopart.session.state.companions import refusal

_NUMBERS = int | float | torch.Tensor
_HOW = ("foreach", "fused", "capturable")
"""Options that say how an update is computed, not what; they stay those of the optimizer that loads."""
_MADE = "make the optimizer from pipe.parameters() or pipe.named_parameters(), after the last change of the plan"


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """What one rank's optimizer holds.

    groups: options (encoded) and names of each parameter group.  tensors, values: of the state, by (parameter, key);
    the values are encoded.
    """

    kind: str
    groups: tuple[Group, ...]
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)

    def without_tensors(self) -> OptimizerPart:
        """Return the same with None in place of each tensor, to tell other ranks."""
        return replace(self, tensors=dict.fromkeys(self.tensors))  # type: ignore[arg-type]


def part_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerPart:
    """Return what an optimizer holds.  names: of this rank's parameters by identity, "" for one that stands for none.

    Raises CheckpointError for a parameter that is not among them, and for state that is neither tensors nor JSON."""
    kind = type(optimizer).__name__
    part = OptimizerPart(
        kind, tuple(_group(group, number, names) for number, group in enumerate(optimizer.param_groups))
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if not name or not isinstance(key, str) or "/" in key:
                    raise CheckpointError(f"the state {key!r} of {kind} cannot be saved", why="its key is not a name")
                if isinstance(value, torch.Tensor):
                    part.tensors[name, key] = value
                else:
                    part.values[name, key] = encoded(value, f"state {key!r} of {name} in {kind}")
    return part


def _group(group: Mapping[str, Any], number: int, names: Mapping[int, str]) -> Group:
    unknown = next((parameter for parameter in group["params"] if id(parameter) not in names), None)
    if unknown is not None:
        raise CheckpointError(
            f"the optimizer updates a tensor of shape {tuple(unknown.shape)} that this rank does not train",
            why="it was made from other parameters, or before the plan was changed",
            fix=_MADE,
        )
    options = {
        key: encoded(value, f"option {key!r} of parameter group {number}")
        for key, value in group.items()
        if key not in ("params", "param_names", *_HOW)
    }
    return Group(options, tuple(name for p in group["params"] if (name := names[id(p)])))


def joined(parts: Sequence[OptimizerPart | None]) -> OptimizerState | None:
    """Return the state of all ranks' optimizers as one; None if no rank has one.  O(parameters of all ranks).

    Raises CheckpointError if the ranks have optimizers of different kinds, or groups that differ in more than their
    parameters."""
    if all(part is None for part in parts):
        return None
    first = next(part for part in parts if part is not None)
    names: list[dict[str, None]] = [{} for _ in first.groups]
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, None]] = {}
    for rank, part in enumerate(parts):
        if part is None or (part.kind, len(part.groups)) != (first.kind, len(first.groups)):
            other = "none" if part is None else f"{part.kind} with {len(part.groups)} parameter groups"
            raise CheckpointError(
                f"the optimizers of the ranks differ: {first.kind} with {len(first.groups)} parameter groups, and on "
                f"rank {rank} {other}",
                fix="make the same optimizer, with the same groups, on every rank; a group may be empty on some",
            )
        for number, group in enumerate(part.groups):
            differing = sorted(
                key
                for key in group.options.keys() | first.groups[number].options.keys()
                if group.options.get(key) != first.groups[number].options.get(key)
            )
            if differing:
                raise CheckpointError(
                    f"option {differing[0]!r} of parameter group {number} differs between ranks",
                    why=f"it is {first.groups[number].options.get(differing[0])!r} and, on rank {rank}, "
                    f"{group.options.get(differing[0])!r}",
                    fix="set the options of a group alike on every rank",
                )
            names[number].update(dict.fromkeys(group.names))
        for (name, key), value in part.values.items():
            values.setdefault(name, {})[key] = value
        for name, key in part.tensors:
            tensors.setdefault(name, {})[key] = None
    groups = tuple(Group(group.options, tuple(names[number])) for number, group in enumerate(first.groups))
    return OptimizerState(first.kind, groups, values, {name: tuple(keys) for name, keys in tensors.items()})


def check_fits(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: OptimizerState
) -> list[dict[str, Any]]:
    """Return the saved options of each parameter group of an optimizer.  Local; changes nothing.

    Raises CheckpointError for another kind of optimizer, a group whose parameters were in different groups, and values
    that no optimizer of this kind has: once this has returned, `adopt_state` cannot fail."""
    kind = type(optimizer).__name__
    if kind != saved.kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved.kind}, and the optimizer is {kind}",
            fix=f"make a {saved.kind}, or load without optimizer=",
        )
    home = {name: number for number, group in enumerate(saved.groups) for name in group.names}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        own = _group(group, number, names)
        sources = sorted({home[name] for name in own.names if name in home})
        if not sources:
            sources = [number] if len(saved.groups) == len(optimizer.param_groups) else []
        if len(sources) > 1:
            raise CheckpointError(
                f"parameter group {number} joins parameters of groups {sources} of the checkpoint",
                why="a group has one learning rate, and these had different ones",
                fix="make the parameter groups as in the run that was saved",
            )
        options = saved.groups[sources[0]].options if sources else {}
        what = f"of group {number}"
        found.append({k: decoded(v, f"option {k!r} {what}") for k, v in options.items() if k not in _HOW})
        for key, value in found[-1].items():
            if key in ("params", "param_names") or not _alike(value, group.get(key)):
                raise refusal(f"option {key!r} {what}", value, f"this {kind} has {group.get(key)!r:.80}")
        for name in own.names:
            for key, value in saved.values.get(name, {}).items():
                decoded(value, f"state {key!r} of {name}")
            for key in saved.tensors.get(name, ()):
                if "/" in key or key in saved.values.get(name, {}):
                    raise refusal(f"the state of {name}", key, "it has to be the name of one tensor")
    return found


def _alike(saved: Any, own: Any) -> bool:
    """Whether a saved option can take the place of what an optimizer has: both numbers, texts, or lists of such."""
    if own is None:
        return True
    if isinstance(own, tuple | list):
        return isinstance(saved, tuple | list) and len(saved) == len(own) and all(map(_alike, saved, own))
    numbers = isinstance(saved, _NUMBERS) and isinstance(own, _NUMBERS)
    return numbers or isinstance(saved, type(own))


def adopt_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    options: Sequence[Mapping[str, Any]],
    saved: OptimizerState,
    tensors: Mapping[tuple[str, str], torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Give an optimizer the saved options and state.  Local; everything was checked before.

    options: of each group (`check_fits`).  tensors: by (parameter, key).  dtypes: of each parameter when it was saved:
    state of that dtype follows the parameter's present one, other state keeps its own."""
    for group, saved_options in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved_options.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(float(value))
            else:
                group[key] = value
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            state: dict[str, Any] = {}
            for key in saved.tensors.get(name, ()):
                tensor = tensors[name, key]
                if tensor.dtype == dtypes.get(name) and key != "step":
                    tensor = tensor.to(parameter.dtype)
                state[key] = tensor if key == "step" and not on_device else tensor.to(parameter.device)
            state |= {key: decoded(value) for key, value in saved.values.get(name, {}).items()}
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state

"""The state of torch optimizers by the names of the parameters, independent of ranks and plans.

A torch optimizer numbers its parameters, so its own state_dict means something else on every rank and under every plan.
Several optimizers are like one with the parameter groups of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopart.files.checkpoints.document import Group, OptimizerState
from autopart.files.checkpoints.values import decoded, encoded
from autopart.ir.errors import CheckpointError, UsageError
from autopart.runtime.tensors import laid_as
from autopart.state.companions import refusal

_NUMBERS = int | float | torch.Tensor
HOW = ("foreach", "fused", "capturable")
"""Options that say how an update is computed, not what; they stay those of the optimizer that loads."""
_MADE = "make the optimizer from pipe.parameters() or pipe.named_parameters(), after the last change of the plan"
_NEEDED = {"optimizer": ("param_groups", "state"), "scheduler": ("load_state_dict",)}
Optimizers = Sequence[torch.optim.Optimizer]
Key = tuple[str, str]
"""Name of a parameter, and what the optimizer calls a part of its state."""
GivenOptimizer = torch.optim.Optimizer | Optimizers | None
"""What a call of a user may be given: an optimizer, a list of them, or none."""


def given_as(kind: str, given: Any) -> tuple[Any, ...]:
    """Return the objects that a call was given as one, as a list or as none.  kind: "optimizer" or "scheduler".
    Raises UsageError for anything else."""
    found = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    for each in found:
        if not all(hasattr(each, name) for name in _NEEDED[kind]):
            raise UsageError(
                f"the {kind} is a {type(each).__name__}",
                fix=f"pass one {kind}, or a list of them: (folder, [muon, adamw], [their, schedulers])",
            )
    return found


def groups_with(optimizers: Optimizers) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Yield the parameter groups of several optimizers, one after the other, each with its optimizer."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield optimizer, group


def state_of(optimizers: Optimizers, names: Mapping[int, str]) -> tuple[OptimizerState, dict[Key, torch.Tensor]]:
    """Return what one rank's optimizers hold: their state without tensors, and these.  names: of this rank's parameters
    by identity, "" for one that stands for none.

    Raises CheckpointError for a parameter that is not among them, and for state that is neither tensors nor JSON."""
    found, tensors = OptimizerState("", groups_of(optimizers, names)), dict[Key, torch.Tensor]()
    for optimizer, group in groups_with(optimizers):
        kind = type(optimizer).__name__
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                if not name or not isinstance(key, str) or "/" in key:
                    raise CheckpointError(f"the state {key!r} of {kind} cannot be saved", why="its key is not a name")
                if isinstance(value, torch.Tensor):
                    found.tensors[name] = (*found.tensors.get(name, ()), key)
                    tensors[name, key] = value
                else:
                    saved = encoded(value, f"state {key!r} of {name} in {kind}")
                    found.values.setdefault(name, {})[key] = saved
    return found, tensors


def groups_of(optimizers: Optimizers, names: Mapping[int, str]) -> tuple[Group, ...]:
    """Return the parameter groups of this rank's optimizers, by the names of the parameters.

    Raises CheckpointError for a parameter that has no name, and for one that two optimizers update."""
    found: list[Group] = []
    for number, (optimizer, group) in enumerate(groups_with(optimizers)):
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
            if key not in ("params", "param_names", *HOW)
        }
        own = tuple(name for p in group["params"] if (name := names[id(p)]))
        found.append(Group(options, own, type(optimizer).__name__))
    twice = [name for name, count in Counter(name for group in found for name in group.names).items() if count > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is updated by two optimizers", fix="give each parameter to one of them")
    return tuple(found)


def _described(groups: Sequence[Group]) -> str:
    kinds = Counter(group.kind for group in groups)
    return " and ".join(f"{kind} with {count} parameter groups" for kind, count in kinds.items()) or "none"


def _require_alike(ranks: Sequence[Sequence[Group]]) -> None:
    """Raise CheckpointError if the ranks have other optimizers, or other numbers of groups."""
    for rank, groups in enumerate(ranks):
        if [group.kind for group in groups] != [group.kind for group in ranks[0]]:
            raise CheckpointError(
                f"the optimizers of the ranks differ: {_described(ranks[0])}, and on rank {rank} {_described(groups)}",
                fix='make the same optimizers, with the same groups, on every rank; {"params": []} is a group that is '
                "empty on some",
            )


def joined(parts: Sequence[OptimizerState | None]) -> OptimizerState | None:
    """Return the state of all ranks' optimizers as one; None if no rank has one.  O(parameters of all ranks).

    Raises CheckpointError if the ranks have optimizers of different kinds, or groups that differ in more than their
    parameters."""
    if all(part is None for part in parts):
        return None
    _require_alike([() if part is None else part.groups for part in parts])
    every = [part for part in parts if part is not None]
    first = every[0].groups
    names: list[dict[str, None]] = [{} for _ in first]
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, tuple[str, ...]] = {}
    for rank, part in enumerate(every):
        for number, group in enumerate(part.groups):
            differing = sorted(
                key
                for key in group.options.keys() | first[number].options.keys()
                if group.options.get(key) != first[number].options.get(key)
            )
            if differing:
                raise CheckpointError(
                    f"option {differing[0]!r} of parameter group {number} differs between ranks",
                    why=f"it is {first[number].options.get(differing[0])!r} and, on rank {rank}, "
                    f"{group.options.get(differing[0])!r}",
                    fix="set the options of a group alike on every rank",
                )
            names[number].update(dict.fromkeys(group.names))
        for name, own in part.values.items():
            values.setdefault(name, {}).update(own)
        for name, keys in part.tensors.items():
            tensors[name] = tuple(dict.fromkeys((*tensors.get(name, ()), *keys)))
    groups = tuple(replace(group, names=tuple(names[number])) for number, group in enumerate(first))
    kind = " + ".join(dict.fromkeys(group.kind for group in groups))
    return OptimizerState(kind, groups, values, tensors)


def matched(ranks: Sequence[Sequence[Group]], saved: OptimizerState) -> tuple[int | None, ...]:
    """Return for each parameter group the number of the saved one that had its parameters; None if no group had them.
    ranks: the groups of each rank's optimizers.  A saved group may have been split; a group without parameters on any
    rank keeps its number where that is free, since nothing follows from it.

    Raises CheckpointError for a group whose parameters were in different groups, for another kind of optimizer, and for
    ranks that differ."""
    _require_alike(ranks)
    home = {name: number for number, group in enumerate(saved.groups) for name in group.names}
    found: list[int | None] = []
    empty = set[int]()
    for number, same in enumerate(zip(*ranks, strict=True)):
        names = [name for group in same for name in group.names]
        sources = sorted({home[name] for name in names if name in home})
        kinds = {saved.groups[source].kind or saved.kind for source in sources or range(len(saved.groups))}
        if same[0].kind not in kinds:
            raise CheckpointError(
                f"the checkpoint holds the state of {' + '.join(sorted(kinds))}, and the optimizer is {same[0].kind}",
                fix=f"make the same optimizer, {min(kinds)}, or load without optimizer=",
            )
        if len(sources) > 1:
            raise CheckpointError(
                f"parameter group {number} joins parameters of groups {sources} of the checkpoint",
                why="a group has one learning rate, and these had different ones",
                fix="make the parameter groups as in the run that was saved",
            )
        found.append(sources[0] if sources else None)
        empty |= set() if names else {number}
    free = set(range(len(saved.groups))) - set(found)
    return tuple(n if n in empty & free else source for n, source in enumerate(found))


def check_fits(
    optimizers: Optimizers, names: Mapping[int, str], saved: OptimizerState, sources: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Return the saved options of each parameter group of optimizers.  Local; changes nothing.

    sources: of the groups (`matched`).  Raises CheckpointError for values that no optimizer of this kind has: once this
    has returned, `give_state` cannot fail."""
    found = []
    for number, ((optimizer, group), source) in enumerate(zip(groups_with(optimizers), sources, strict=True)):
        options = saved.groups[source].options if source is not None else {}
        what = f"of group {number}"
        found.append({k: decoded(v, f"option {k!r} {what}") for k, v in options.items() if k not in HOW})
        for key, value in found[-1].items():
            if key in ("params", "param_names") or not _alike(value, group.get(key)):
                kind = type(optimizer).__name__
                raise refusal(f"option {key!r} {what}", value, f"this {kind} has {group.get(key)!r:.80}")
        for name in [names[id(parameter)] for parameter in group["params"]]:
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


def give_state(
    optimizers: Optimizers,
    names: Mapping[int, str],
    options: Sequence[Mapping[str, Any]],
    saved: OptimizerState,
    tensors: Mapping[Key, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Give optimizers the saved options and state.  Local; everything was checked before.

    options: of each group.  tensors: by (parameter, key).  dtypes: of each parameter when it was saved:
    state of that dtype follows the parameter's present one, other state keeps its own."""
    for (optimizer, group), saved_options in zip(groups_with(optimizers), options, strict=True):
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
                kept = tensor if key == "step" and not on_device else tensor.to(parameter.device)
                state[key] = laid_as(parameter, kept)
            state |= {key: decoded(value) for key, value in saved.values.get(name, {}).items()}
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state

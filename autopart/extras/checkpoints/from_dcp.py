"""What a folder of `torch.distributed.checkpoint` (DCP) holds, sorted into the parts of a checkpoint of ours.

    {"model": {NAME: tensor}, "optim": {"state": {NAME: {KEY: value}}, "param_groups": [{..., "params": [NAME]}]}}

is what DCP holds, as `torch.distributed.checkpoint.state_dict` gives and takes it; "autopart" in it is the rest of a
checkpoint of ours, so that nothing is lost there and back (`to_dcp.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from autopart.extras.checkpoints.saving import Values
from autopart.files.checkpoints.dcp import Chunk, DcpFolder, ShardedTensor
from autopart.files.checkpoints.document import OPTIMIZER, Group, OptimizerState
from autopart.files.checkpoints.values import encoded
from autopart.files.documents import parse_json
from autopart.files.reading import named
from autopart.ir.errors import CheckpointError, UsageError
from autopart.state.optimizers import HOW

MODEL, OPTIM, REST = "model", "optim", "autopart"
_NAMES = "pass optimizer state by names, as torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it"


@dataclass
class Found:
    """What a folder of another format holds.  left: what has no place in a checkpoint of ours."""

    weights: dict[str, Values] = field(default_factory=dict)
    more: dict[str, Values] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    rest: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    left: list[str] = field(default_factory=list)


def from_dcp(folder: DcpFolder, kind: str) -> Found:
    """Sort what a folder of DCP holds.  Reads objects, and no tensor."""
    found = Found()
    parts: dict[str, dict[Any, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    every: dict[tuple[str | int, ...], ShardedTensor | Chunk] = {**folder.tensors, **folder.objects}
    tops = {path[0] for path in every}
    home = OPTIM if OPTIM in tops else "optimizer"
    for path, each in every.items():
        if path[0] == home and len(path) == 4 and path[1] in parts:
            own = parts[str(path[1])].setdefault(path[2], {})
            own[str(path[3])] = each if isinstance(each, ShardedTensor) else each.load()
        elif not _take(found, path, each, models=(MODEL,) if MODEL in tops else tops - {home}):
            found.left.append(".".join(map(str, path)))
    if not found.weights:
        raise CheckpointError("the checkpoint has no weights", fix=f'save them under the key "{MODEL}"')
    kinds = found.rest.pop("optimizers", None)
    state, groups = ({key: values[key] for key in sorted(values)} for values in parts.values())
    if kind == "none":
        found.left += [home] if state or groups else []
    elif state or groups:
        _take_optimizer(found, state, [*groups.values()], [kind] if kind else kinds or [])
    elif any(path.startswith(f"{home}.") for path in found.left):
        raise CheckpointError(f'the state under "{home}" is not by parameter and key', fix=_NAMES)
    return found


def _take(
    found: Found, path: tuple[str | int, ...], each: ShardedTensor | Chunk, models: Collection[str | int]
) -> bool:
    """Take a weight, or what belongs to a checkpoint of ours; returns whether it is one of them.  models: first keys of
    weights."""
    if path == (REST, "document") and isinstance(each, Chunk):
        with named("the document of autopart", CheckpointError):
            found.rest = dict(parse_json(str(each.load())))
    elif path[0] == REST and isinstance(each, ShardedTensor):
        found.more[str(path[-1])] = each
    elif path[0] in models and isinstance(each, ShardedTensor):
        found.weights[".".join(map(str, path[1:] if path[0] == MODEL else path))] = each
    else:
        return False
    return True


def _take_optimizer(
    found: Found, state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]], kinds: list[str]
) -> None:
    """Put the state of an optimizer where ours lies.  kinds: its classes, of each group or of all."""
    if not kinds:
        raise UsageError(
            "the checkpoint does not say which optimizer its state is of",
            fix="pass --optimizer with the name of its class, such as AdamW, or --optimizer none for the weights alone",
        )
    made = []
    for number, group in enumerate(groups):
        names = group.pop("params", ())
        wrong = next((name for name in [*names, *state] if name not in found.weights), None)
        if wrong is not None:
            raise CheckpointError(f"the optimizer has state of {wrong!r}, which is no weight", fix=_NAMES)
        read = {key: value.read() if isinstance(value, ShardedTensor) else value for key, value in group.items()}
        options = {k: encoded(v, f"option {k!r}") for k, v in read.items() if k not in (*HOW, "param_names")}
        made.append(Group(options, tuple(map(str, names)), kinds[number % len(kinds)]))
    tensors: dict[str, tuple[str, ...]] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        for key, value in own.items():
            if isinstance(value, ShardedTensor):
                tensors[name] = (*tensors.get(name, ()), key)
                found.more[f"{OPTIMIZER}/{key}/{name}"] = value
            else:
                values.setdefault(name, {})[key] = encoded(value, f"state {key!r} of {name}")
    found.optimizer = OptimizerState(" + ".join(dict.fromkeys(kinds)), tuple(made), values, tensors)

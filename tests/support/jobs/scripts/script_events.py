"""Random events of a training script that change a model between steps, applied alike to a pipe's model and to a torch
model.

An event is data: a name and its arguments. `_DRAWS` draws events and `_DO` applies them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import nn

from support.models import script_models as models
from support.models.script_models import WIDTH, Scripted

Event = tuple[Any, ...]
STORED = ("save", "load back", "into")
CALLS = ("step", "accumulate", "eval_loss", "predict", "gradients", "state", "clip", "sync", "schedule", *STORED)
"""Events that are calls of a pipe, or of an optimizer, and not changes of a model."""
SETTINGS = ("batch", "vary", "lr")
"""Events that change what is trained with."""


def change(model: Scripted, event: Event) -> None:
    """Apply an event that changes the model or the Python state around it."""
    _DO[event[0]](model, *event[1:])


def words(event: Event) -> tuple[str, ...]:
    """Return words of which an error about this event must contain one."""
    name = event[0]
    if name == "batch":
        return ("rows", "batch", "input", "kind", "shape", "operations", "along", "ignore", "micro")
    if name == "vary":
        return (*words(("batch",)), *event[1])
    if name in STORED:
        return ("checkpoint", "save", "load", "state", "optimizer")
    if name == "freeze":
        return ("requires_grad", "frozen", "optimizer", "parts")
    if name == "hook":
        return ("hook",)
    if name in ("load", "double", "float"):
        return ("was replaced", "is of torch.float32")
    if name in ("mode", "eval all"):
        return ("training", "rows", "micro")
    if name == "global":
        return (str(event[1]), "Settings", "gamma", "helper")
    path = str(event[1]) if len(event) > 1 else name
    return (path, path.rpartition(".")[2])


# -- drawing -------------------------------------------------------------------------------------------------------


def draw(random: Random, model: Scripted) -> Event:
    """Return a random event that is possible for the model. Events that are refused, and end a script, are rare."""
    while True:
        event = random.choice(_DRAWS)(random, model)
        if event is None or ((event[0] in _REFUSED or event == ("load", True)) and random.random() < 0.8):
            continue
        return event


_REFUSED = ("float", "replace", "retie", "linear", "hook", "shift")


def _number(random: Random) -> Any:
    return random.choice([0.25, 0.5, 1.0, 1, 2, 0.75, True])


def _some(random: Random, model: nn.Module, *kinds: type) -> tuple[str, Any] | None:
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    return random.choice(found) if found else None


def _attribute(random: Random, model: Scripted) -> Event | None:
    """Return an event that sets a number held by a module."""
    kind, name = random.choice([
        (models.Dense, "gain"), (models.Scaled, "beta"), (models.Scaled, "gamma"), (models.Scaled, "flag"),
        (models.Counting, "decay"), (models.Optional, "bonus"), (Scripted, "temperature"), (nn.LayerNorm, "eps"),
        (nn.Dropout, "p"), (nn.BatchNorm1d, "momentum"), (nn.BatchNorm1d, "eps"), (Scripted, "unread"),
    ])  # fmt: skip
    found = _some(random, model, kind)
    if found is None:
        return None
    value = _number(random)
    if name == "flag":
        value = random.choice([True, False, 1, 0])
    if name == "p":
        value = random.choice([0.0, 1.0, 0])
    if name in ("eps", "momentum"):
        value = random.choice([0.1, 0.5, 1e-3])
    return ("set", f"{found[0]}.{name}" if found[0] else name, value)


def _container(random: Random, model: Scripted) -> Event | None:
    found = _some(random, model, models.Configured, models.Several)
    if found is None:
        return None
    path, module = found
    if isinstance(module, models.Several):
        return ("weights", path, random.choice(["change", "append", "new", "shorter"]), _number(random))
    what = random.choice(["scale", "append", "act", "alpha", "helper", "new"])
    return ("config", path, what, random.choice(["sin", "tanh"]) if what == "act" else _number(random))


def _tensor(random: Random, model: Scripted) -> Event:
    """Return an event that changes a parameter or a buffer."""
    named = dict(model.named_parameters())
    name = random.choice(list(named))
    what = random.choice(["edit", "edit", "grad", "grad", "replace", "retie", "fill"])
    buffers = [n for n, b in model.named_buffers() if b.is_floating_point()]
    if what == "fill":
        return ("fill", random.choice(buffers), 0.5) if buffers else ("edit", name, 0.5)
    if what == "grad":
        return ("grad", name, random.choice([True, False]))
    if what == "replace":
        name = random.choice([*named, *buffers])
        return ("replace", name, random.choice([True, False]))
    if what == "retie":
        dense = [path for path, m in model.named_modules() if type(m) is nn.Linear]
        return ("retie", f"{random.choice(dense)}.weight", f"{random.choice(dense)}.weight")
    return ("edit", name, random.choice([0.5, 0.9, 1.1]))


def _plain(random: Random, model: Scripted) -> Event | None:
    found = _some(random, model, models.Plainly)
    if found is None:
        return None
    return ("plain", f"{found[0]}.plain", random.choice(["write", "new", "data", "elsewhere", "mask", "new mask"]))


def _kept(random: Random, model: Scripted) -> Event | None:
    found = _some(random, model, models.Extra)
    return ("kept", found[0], random.choice(["gain", "amax", "new"]), _number(random)) if found else None


def _freeze(random: Random, model: Scripted) -> Event:
    return ("freeze", random.choice([0, 1, len(model.parts)]))


def _data(random: Random, model: Scripted) -> Event:
    """Return an event that points a parameter or a buffer to other memory, or writes to it, by `.data`."""
    name = random.choice([n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_floating_point()])
    return ("elsewhere", name, random.choice([0.5, 0.9, 1.1]))


def _vary(random: Random, model: Scripted) -> Event:
    return ("vary", tuple(random.sample(["note", "scale", "tag"], random.randint(0, 2))), random.choice(["", "a"]))


def _store(random: Random, model: Scripted) -> Event:
    return random.choice(
        [("save", True), ("save", False), ("load back", False), ("load back", True), ("into",), ("schedule",)]
    )


def _module(random: Random, model: Scripted) -> Event | None:
    what = random.choice(
        ["activation", "linear", "patch", "hook", "unhook", "shift", "swap", "method", "cell", "global"]
    )
    if what == "global":
        return ("global", random.choice(["ALPHA", "CONFIG", "beta", "gamma", "helper", "factor", "forward"]), 0.25)
    kinds = {
        "activation": (models.Dense,), "shift": (models.Optional,), "swap": (models.Several,),
        "method": (models.Surrounded,), "cell": (models.Surrounded,), "linear": (models.Dense,),
    }  # fmt: skip
    found = _some(random, model, *kinds.get(what, (models.Dense, nn.Linear, models.Scaled, models.Attention)))
    return (what, *([found[0]] if found else [])) if found else None


def _mode(random: Random, model: Scripted) -> Event:
    path = random.choice([path for path, _ in model.named_modules()])
    return ("mode", path, random.choice([True, False]))


def _batch(random: Random, model: Scripted) -> Event:
    more: dict[str, Any] = {}
    for name, values in (
        ("red", ["mean", "sum"]), ("ignore", [-100, 0, 1]), ("scale", [0.5, 2, 2.0]), ("mask", [True]),
        ("narrow", [True]), ("turned", [True]), ("note", [1, "a"]), ("tag", [3, "a3", 0.5]),
    ):  # fmt: skip
        if random.random() < 0.25:
            more[name] = random.choice(values)
    return ("batch", random.choice([8, 8, 6, 5, 4, 3]), random.choice([4, 4, 3, 2]), random.randrange(3), more)


def _call(random: Random, model: Scripted) -> Event:
    return random.choice([
        ("eval_loss",), ("predict",), ("gradients",), ("state", 1.0), ("state", 0.9), ("clip", 0.1), ("sync",),
        ("lr", 0.05), ("accumulate",), ("load", False), ("load", True), ("double",), ("float",),
    ])  # fmt: skip


def _step(random: Random, model: Scripted) -> Event:
    return ("step", random.choice([True, True, False]))


def of_python(random: Random, model: Scripted) -> Event:
    """Return an event that changes Python values of a model alone."""
    while True:
        if event := random.choice((_attribute, _container, _kept))(random, model):
            return event


_DRAWS: tuple[Callable[[Random, Scripted], Event | None], ...] = (
    _step, _step, _step, _step, _step, _attribute, _attribute, _container, _tensor, _module, _mode, _batch, _batch,
    _call, _call, _plain, _kept, _freeze, _data, _vary, _store, _store,
)  # fmt: skip


# -- playing -------------------------------------------------------------------------------------------------------


def _set(model: nn.Module, place: str, value: Any) -> None:
    path, _, name = place.rpartition(".")
    setattr(model.get_submodule(path), name, value)


def _get(model: nn.Module, place: str) -> Any:
    path, _, name = place.rpartition(".")
    return getattr(model.get_submodule(path), name)


def _config(model: nn.Module, path: str, what: str, value: Any) -> None:
    part: Any = model.get_submodule(path)
    if what == "scale":
        part.config["scale"][1] = value
    elif what == "append":
        part.config["scale"].append(value)
    elif what == "act":
        part.config["deep"]["er"]["act"] = value
    elif what == "alpha":
        part.shared.alpha = value
    elif what == "helper":
        part.helper.scale = value
    else:
        part.config = {"scale": [value, 1.0], "deep": {"er": {"act": "sin"}}}


def _weights(model: nn.Module, path: str, what: str, value: Any) -> None:
    part: Any = model.get_submodule(path)
    if what == "change":
        part.weights[0] = value
    elif what == "append":
        part.weights.append(value)
    elif what == "new":
        part.weights = [value, 0.5]
    else:
        del part.weights[1:]


def _edit(model: nn.Module, name: str, factor: float) -> None:
    _get(model, name).data.mul_(factor)


def _fill(model: nn.Module, name: str, value: float) -> None:
    _get(model, name).fill_(value)


def _plain_tensor(model: nn.Module, name: str, what: str) -> None:
    part: Any = model.get_submodule(name.rpartition(".")[0])
    if what == "write":
        part.plain.mul_(1.25)
    elif what == "new":
        part.plain = part.plain * 1.5
    elif what == "data":
        part.plain.data.mul_(1.25)
    elif what == "elsewhere":
        part.plain.data = part.plain.data * 1.25
    elif what == "mask":
        part.seen[0] = ~part.seen[0]
    else:
        part.seen = torch.ones_like(part.seen)


def _extra(model: nn.Module, path: str, what: str, value: Any) -> None:
    part: Any = model.get_submodule(path)
    if what == "gain":
        part.kept["gain"] = value
    elif what == "amax":
        part.kept["amax"].mul_(1.5)
    else:
        part.kept = {"gain": value, "amax": torch.arange(3.0), "more": [None, {"text": "t"}]}


def _elsewhere(model: nn.Module, name: str, factor: float) -> None:
    tensor = _get(model, name)
    tensor.data = tensor.data * factor


def _grad(model: nn.Module, name: str, value: bool) -> None:
    _get(model, name).requires_grad_(value)


def _replace(model: nn.Module, name: str, same: bool) -> None:
    old = _get(model, name)
    new = old.detach().clone() * (1.0 if same else 0.5)
    _set(model, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def _retie(model: nn.Module, name: str, other: str) -> None:
    _set(model, name, _get(model, other))


def _activation(model: nn.Module, path: str) -> None:
    model.get_submodule(path).activation = nn.Sigmoid()


def _linear(model: nn.Module, path: str) -> None:
    torch.manual_seed(1)
    model.get_submodule(path).linear = nn.Linear(WIDTH, WIDTH).double()


def _swap(model: nn.Module, path: str) -> None:
    part: Any = model.get_submodule(path)
    part.parts[0], part.parts[1] = part.parts[1], part.parts[0]


def _patch(model: nn.Module, path: str) -> None:
    module: Any = model.get_submodule(path)
    forward = type(module).forward
    module.forward = lambda *args: forward(module, *args) * 0.5


def _method(model: nn.Module, path: str) -> None:
    model.get_submodule(path).factor = types.MethodType(lambda self: 0.75, model.get_submodule(path))


def _cell(model: nn.Module, path: str) -> None:
    part: Any = model.get_submodule(path)
    part.scale.__closure__[0].cell_contents = 0.25


def _hook(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_forward_hook(lambda module, given, result: result * 2)


def _unhook(model: nn.Module, path: str) -> None:
    model.get_submodule(path).register_forward_hook(lambda module, given, result: result * 2).remove()


def _shift(model: nn.Module, path: str) -> None:
    model.get_submodule(path).shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.double))


def _global(model: nn.Module, name: str, value: float) -> None:
    if name == "ALPHA":
        models.ALPHA = value
    elif name == "CONFIG":
        models.CONFIG["alpha"] = value
    elif name == "beta":
        models.Settings.beta = value
    elif name == "gamma":
        models.Scaled.gamma = value
    elif name == "helper":
        models.helper = lambda: value  # type: ignore[assignment]
    elif name == "factor":
        models.Surrounded.factor = lambda self: value  # type: ignore[method-assign]
    else:
        models.Dense.forward = lambda self, h, mask: torch.sin(self.linear(h))  # type: ignore[method-assign]


def _load(model: nn.Module, assign: bool) -> None:
    model.load_state_dict(scaled(model.state_dict(), 0.9), assign=assign)


def scaled(state: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a state with other numbers in its tensors, apart from extra state."""
    return {n: t * factor if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in state.items()}


_DO: dict[str, Callable[..., Any]] = {
    "set": _set, "config": _config, "weights": _weights, "edit": _edit, "fill": _fill, "grad": _grad,
    "replace": _replace, "retie": _retie, "activation": _activation, "linear": _linear, "swap": _swap, "patch": _patch,
    "method": _method, "cell": _cell, "hook": _hook, "unhook": _unhook, "shift": _shift, "global": _global,
    "plain": _plain_tensor, "kept": _extra, "elsewhere": _elsewhere, "freeze": lambda model, count: model.freeze(count),
    "load": _load, "mode": lambda model, path, flag: model.get_submodule(path).train(flag),
    "double": lambda model: model.double(), "float": lambda model: model.float(),
}  # fmt: skip

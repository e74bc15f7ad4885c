"""What `state_dict()` makes of a model is applied to the whole model alone, and its tensors move by their own names."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.ir.errors import AutopartError, CheckpointError

DEPTH, WIDTH, ROWS = 4, 6, 8
TRANSFORMS = ("none", "clone", "cast", "scaled", "rename", "rename only", "drop", "split", "added", "post clone")
EXTRAS = ("none", "tensor", "nested", "None", "list", "object", "unsent")


class Note:
    """An object that is neither JSON nor a tensor."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note) and other.text == self.text


class Stateful(nn.Linear):
    """A layer with extra state."""

    extra: Any = "first"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Net(nn.Module):
    """Layers, running statistics, a buffer that is saved and one that is not."""

    def __init__(self, kinds: tuple[str, ...], extras: tuple[str, ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList((nn.Linear if e == "none" else Stateful)(WIDTH, WIDTH) for e in extras)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("left", torch.randn(WIDTH), persistent=False)
        self.double()
        for layer, kind, extra in zip(self.layers, kinds, extras, strict=True):
            transform(layer, kind)
            if extra != "none":
                layer.extra = value_of(extra, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.norm(x) + self.shift).square().mean()


class Cloned(Net):
    """Returns copies in a plain dict."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {name: _copied(value) for name, value in super().state_dict(*args, **options).items()}


def value_of(extra: str, turn: int) -> Any:
    return {
        "tensor": torch.full((3,), float(turn)), "nested": {"amax": [torch.ones(2, turn + 1)], "a.b": (turn, "x")},
        "None": None if turn else "was", "list": [turn, float("inf")], "object": Note(str(turn)),
        "unsent": (lambda: turn),
    }[extra]  # fmt: skip


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _moved(state: Any, old: str, new: str) -> None:
    state[new] = state.pop(old)


def _split(state: Any, prefix: str) -> None:
    state[f"{prefix}q"], state[f"{prefix}k"] = state.pop(f"{prefix}weight").clone().chunk(2)


SAVED: dict[str, Any] = {
    "clone": lambda m, s, p: s.update({f"{p}weight": s[f"{p}weight"].clone()}),
    "cast": lambda m, s, p: s.update({f"{p}weight": s[f"{p}weight"].to(torch.bfloat16)}),
    "scaled": lambda m, s, p: s.update({f"{p}weight": s[f"{p}weight"] * 2}),
    "rename": lambda m, s, p: _moved(s, f"{p}weight", f"{p}kernel"),
    "rename only": lambda m, s, p: _moved(s, f"{p}weight", f"{p}kernel"),
    "drop": lambda m, s, p: s.__delitem__(f"{p}bias"),
    "split": lambda m, s, p: _split(s, p),
    "added": lambda m, s, p: s.update({f"{p}made": m.made}),
    "post clone": lambda m, s, p: s.update({name: _copied(s[name]) for name in list(s)}),
}
LOADED: dict[str, Any] = {
    "scaled": lambda m, s, p: s.update({f"{p}weight": s[f"{p}weight"] / 2}),
    "rename": lambda m, s, p: _moved(s, f"{p}kernel", f"{p}weight"),
    "split": lambda m, s, p: s.update({f"{p}weight": torch.cat([s.pop(f"{p}{part}") for part in "qk"])}),
    "added": lambda m, s, p: setattr(m, "made", s.pop(f"{p}made").clone()),
}


def transform(layer: nn.Module, kind: str) -> None:
    """Register hooks that change what a layer saves, and most of them what it loads."""
    layer.made = torch.zeros(2)
    if kind == "post clone":
        layer.register_state_dict_post_hook(lambda m, s, p, _: SAVED[kind](m, s, p))
    elif kind != "none":
        layer._register_state_dict_hook(lambda m, s, p, _: SAVED[kind](m, s, p))
    if kind in LOADED:
        layer.register_load_state_dict_pre_hook(lambda m, s, p, *_: LOADED[kind](m, s, p))


def drawn(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    extras = tuple(draw.choice(EXTRAS[: 5 if draw.random() < 0.7 else 7]) for _ in range(DEPTH))
    kinds = tuple(draw.choice(TRANSFORMS) for _ in range(DEPTH))
    return {"cls": draw.choice((Net, Net, Cloned)), "kinds": kinds, "extras": extras, "cut": draw.randint(1, 3)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        loose = 1e-2 if a.dtype == torch.bfloat16 else 1e-9
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=loose, atol=loose)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return callable(a) if callable(b) else a == b


def held(model: Any) -> dict[str, Any]:
    """Return everything that a model remembers."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    extra = {f"{n}.extra": layer.extra for n, layer in model.named_modules() if isinstance(layer, Stateful)}
    made = {f"{n}.made": layer.made for n, layer in model.named_modules() if hasattr(layer, "made")}
    return {**{name: tensor.detach().clone() for name, tensor in found.items()}, **extra, **made}


def differences(found: dict[str, Any], expected: dict[str, Any], what: str) -> list[str]:
    names = sorted(found.keys() | expected.keys())
    wrong = [n for n in names if n not in found or n not in expected or not same(found[n], expected[n])]
    return [f"{what}: {wrong}"] if wrong else []


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def told(model: Any, state: Any, *, strict: bool) -> bool:
    """Load a state as plain torch does; returns whether it fits."""
    before = copy.deepcopy(held(model))
    try:
        model.load_state_dict(state, strict=strict)
    except Exception:
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                tensor.copy_(before[name])
        return False
    return True


def round_trips(seed: int, folder: str) -> list[str]:
    """Train, save, load and close on two ranks; returns what differs from plain torch."""
    warnings.simplefilter("ignore")
    run = drawn(seed)
    kinds, extras, wrong = run["kinds"], run["extras"], list[str]()
    build = lambda number: run["cls"](kinds, extras, number)  # noqa: E731
    model, plain, options = build(0), build(0), {"sample": batch(0), "costs": "analytic", "micro_batches": 1}
    cuts = {"stages": 2, "replicas": 1, "cuts": [f"layers.{run['cut']}"]}
    place, unsaved = Path(folder) / str(seed), {"object", "unsent"}.intersection(extras)
    with autopart.compile(model, "cpu:2", **options, **cuts) as pipe:
        rank = pipe.rank
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (pipe, plain)]
        for step in range(2):
            pipe.step(batch(step))
            plain(batch(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for number, extra in enumerate(extras):
            if extra != "none":
                plain.layers[number].extra = value_of(extra, 1)
                if (number < run["cut"]) == (rank == 0):  # where the layer is trained
                    model.layers[number].extra = value_of(extra, 1)
        state, expected = pipe.state_dict(), plain.state_dict()
        wrong += differences(state, expected, "state_dict")
        for strict in (True, False):
            fresh, other = build(1), build(1)
            if told(fresh, state, strict=strict) != told(other, expected, strict=strict):
                wrong.append("plain torch takes one of the states")
            wrong += differences(held(fresh), held(other), f"loaded by plain torch, strict {strict}")
        try:
            pipe.save(place, optimizers[0])
            wrong += ["saved what cannot be"] if unsaved else []
        except CheckpointError as error:
            wrong += [] if unsaved and "extra state of module layers." in str(error) else [str(error)]
    expected = held(plain)
    wrong += differences(held(model), expected, "closed")
    wrong += [] if unsaved else _again(run, build, plain, place, rank)
    return wrong + _loaded_states(build, options, cuts, plain)


def _again(run: dict[str, Any], build: Any, plain: Any, place: Path, rank: int) -> list[str]:
    """Load a checkpoint in one process, and under another plan."""
    expected, fresh = held(plain), build(2)
    autopart.load_into(fresh, place)
    made = {n: v for n, v in held(fresh).items() if not n.endswith(".made") and n != "left"}
    wrong = differences(made, {n: expected[n] for n in made}, "load_into")
    if rank == 0:
        autopart.save_from(plain, place.with_name(f"{place.name}-plain"))
        fresh = build(4)
        autopart.load_into(fresh, place.with_name(f"{place.name}-plain"))
        made = {n: v for n, v in held(fresh).items() if n in made}
        wrong += differences(made, {n: expected[n] for n in made}, "save_from")
    model = build(3)
    other = {"stages": 1, "replicas": 2} if run["cut"] == 2 else {"stages": 2, "replicas": 1, "cuts": ["layers.2"]}
    options = {"sample": batch(0), "costs": "analytic", "micro_batches": 1, "sync_batchnorm": True, "zero": 0}
    with autopart.compile(model, "cpu:2", **options, **other) as pipe:
        pipe.load(place, torch.optim.Adam(pipe.parameters(), lr=0.1))
    found = {n: v for n, v in held(model).items() if n in made}
    return wrong + differences(found, {n: expected[n] for n in found}, "another plan")


def _loaded_states(build: Any, options: Any, cuts: Any, plain: Any) -> list[str]:
    """Load a state of plain torch into a pipe, or be refused where plain torch refuses it."""
    wrong = []
    for strict in (True, False):
        model, other = build(5), build(5)
        fits = told(other, plain.state_dict(), strict=strict)
        with autopart.compile(model, "cpu:2", **options, **cuts) as pipe:
            try:
                pipe.load_state_dict(plain.state_dict(), strict=strict)
                took = True
            except AutopartError:
                took = False
        if took != fits:
            wrong.append(f"strict={strict}: took {took}, plain torch {fits}")
        wrong += differences(held(model), held(other), f"load_state_dict strict={strict}") if fits else []
    return wrong


# -- tests -----------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 100), marks=pytest.mark.slow)], ids=["few", "many"])
def test_hooks_of_states_and_extra_state_round_trip_as_in_plain_torch(pair: Any, tmp_path: Any, seeds: range) -> None:
    for seed in seeds:
        for rank, wrong in enumerate(pair.run(round_trips, seed, str(tmp_path))):
            assert not wrong, (rank, seed, drawn(seed), wrong)

"""What forward() and the loss read of the Python around them while they are traced, and what they change of it.

One rule: whatever Python value tracing may turn into a constant is a `Reading`, and is compared before every step
(`changes`).  Attributes of modules and objects become readings when they are read; globals, closures, defaults and
class members because a function mentions them (`closure_reads`).  The numbers of a tensor that is neither parameter,
buffer nor input count once a Python number was read from it.  What forward() itself changes is refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopart.capture.python.guards import CaptureWarning
from autopart.capture.python.watch.closure_reads import MODULES_OWN, WHOLE, Reading, Surroundings
from autopart.capture.python.watch.fingerprint import ABSENT, attributes_of, described, fingerprint
from autopart.ir.errors import RefusedError


@dataclass
class Observed:
    """What captures have read so far.

    readings: by home and name.  training: modules whose training flag was read.  order: modules whose parameters,
    buffers or modules were iterated over.  numbers: tensors of which a Python number was read.  changed: refusals of
    what forward() changed.  kept: attributes that it assigned, with the tensor that it read before, or None.
    """

    readings: dict[tuple[int, str], Reading] = field(default_factory=dict)
    training: set[nn.Module] = field(default_factory=set)
    order: set[nn.Module] = field(default_factory=set)
    numbers: dict[int, torch.Tensor] = field(default_factory=dict)
    changed: list[RefusedError] = field(default_factory=list)
    kept: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def update(self, other: Observed) -> None:
        """Add what another capture read."""
        self.readings.update(other.readings)
        self.training.update(other.training)
        self.order.update(other.order)
        self.numbers.update(other.numbers)


class Observer:
    """Notes in `observed` what forward() and other functions read of modules and objects, and what they change."""

    def __init__(self, models: Sequence[nn.Module], loss_fn: Any, observed: Observed) -> None:
        self._observed = observed
        self._around = Surroundings()
        self._paths = {id(module): (path, module) for model in models for path, module in model.named_modules()}
        self._around.objects.update({key: (module, path) for key, (path, module) in self._paths.items()})
        if loss_fn is not None and not isinstance(loss_fn, nn.Module):
            self._around.note({"loss_fn": loss_fn}, "loss_fn", "loss_fn")
        for path, module in self._paths.values():
            self._around.reach(module, path)
        self._noted: set[tuple[int, str]] = set()
        self._written: dict[tuple[int, str], tuple[Any, Any]] = {}  # the object, and a fingerprint of the value before
        self._by_torch: set[tuple[int, str]] = set()
        self._busy = False
        self._constants: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note reads and writes inside.  On this thread alone; one thread at a time."""
        self._tracer = threading.get_ident()
        with contextlib.ExitStack() as self._patches, _Numbers(self._constants, self._observed.numbers):
            self._patched: set[type] = set()
            self._followed = 0
            self._follow()
            yield

    def end(self, *, constants_asked: bool) -> None:
        """Judge what changed while forward() was traced.

        constants_asked: whether a number was read that depends on tensors that are neither parameters, buffers nor
        inputs.
        """
        if constants_asked:
            self._observed.numbers.update(self._constants)
        for reading in list(self._around.found.values()):
            if not reading.changed():
                continue
            tensors = isinstance(reading.value, torch.Tensor) and isinstance(reading.now(), torch.Tensor)
            if reading.owner is not None and tensors:
                self._observed.kept[reading.place] = reading.value
            elif reading.owner is not None or not reading.filled():
                path = self._paths.get(id(reading.owner), ("", None))[0]
                self._observed.changed.append(_changed(reading, path))
        for key, (owner, before) in self._written.items():
            now = (attributes_of(owner) or {}).get(key[1], ABSENT)
            if key not in self._by_torch and fingerprint(now) != before:
                self._observed.kept.setdefault(_joined(self._around.objects[key[0]][1], key[1]), None)
        self._observed.readings.update(self._around.found)

    def _follow(self) -> None:
        """Intercept the classes of all objects that were reached so far."""
        if len(self._around.objects) == self._followed:
            return
        self._followed = len(self._around.objects)
        for thing, _ in list(self._around.objects.values()):
            kind: Any = nn.Module if isinstance(thing, nn.Module) else type(thing)
            if kind not in self._patched:
                self._patched.add(kind)
                self._intercept(kind)

    def _intercept(self, kind: Any) -> None:
        look_up, assign = kind.__getattribute__, kind.__setattr__

        def read(thing: Any, name: str) -> Any:
            try:
                return look_up(thing, name)
            finally:
                if threading.get_ident() == self._tracer and (name[:2] != "__" or name in _WHOLES):
                    self._read(thing, name, sys._getframe(1).f_code)

        def write(thing: Any, name: str, value: Any) -> None:
            if threading.get_ident() == self._tracer:
                self._write(thing, name, sys._getframe(1))
            assign(thing, name, value)

        for name, replacement in (("__getattribute__", read), ("__setattr__", write)):
            before = vars(kind).get(name, ABSENT)
            with contextlib.suppress(TypeError):
                type.__setattr__(kind, name, replacement)
                if before is ABSENT:
                    self._patches.callback(type.__delattr__, kind, name)
                else:
                    self._patches.callback(type.__setattr__, kind, name, before)

    def _write(self, thing: Any, name: str, frame: types.FrameType) -> None:
        key = (id(thing), name)
        if key in self._noted or key[0] not in self._around.objects or _is_torchs_own(thing, name):
            return
        if key not in self._written:
            self._written[key] = thing, fingerprint((attributes_of(thing) or {}).get(name, ABSENT))
        while frame.f_code.co_name == "__setattr__" and frame.f_back is not None:  # through methods that assign
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(_TORCH):
            self._by_torch.add(key)

    def _read(self, thing: Any, name: str, code: types.CodeType) -> None:
        key = (id(thing), name)
        if self._busy or key in self._noted or key[0] not in self._around.objects:
            return
        whole = name in _WHOLES
        # nn.Module's own functions look for one name, in no order, but for `__dir__`
        for_one = code.co_filename == nn.modules.module.__file__ and code.co_name != "__dir__"
        if whole and (for_one or code.co_filename == functools.__file__):
            return
        if isinstance(thing, nn.Module):
            if name == "training" or whole:
                self._observed.training.add(thing)
            if name in _REGISTRIES or whole:
                self._observed.order.add(thing)
        if key in self._written or _is_torchs_own(thing, name):
            return
        self._noted.add(key)
        self._busy = True
        try:
            self._note(thing, name if not whole else WHOLE)
            self._follow()
        finally:
            self._busy = False

    def _note(self, thing: Any, name: str) -> None:
        """Note an attribute where it is found: in the object, or in its class, which the object may hide later."""
        place, held, kind = _joined(self._around.objects[id(thing)][1], name), attributes_of(thing), type(thing)
        inherited = getattr(kind, name, ABSENT)
        if name == WHOLE or isinstance(inherited, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            self._around.note(thing, name, place, thing)
        elif held is None or hasattr(type(inherited), "__set__"):
            self._around.note(kind, name, f"{kind.__qualname__}.{name}", thing)
        else:
            absent = inherited is ABSENT and isinstance(thing, nn.Module) and name not in held
            if not (absent and any(name in held[registry] for registry in _REGISTRIES)):
                self._around.note(held, name, place, thing)


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_WHOLES = frozenset((WHOLE, "__reduce_ex__", "__getstate__", "__copy__", "__deepcopy__", "__dir__"))
"""Reads that return all attributes at once."""
_TORCH = str(Path(torch.__file__).parent)


def _is_torchs_own(thing: Any, name: str) -> bool:
    if not isinstance(thing, nn.Module):
        return False
    hidden = name[0] == "_" and (hasattr(nn.Module, name) or type(thing).__module__.startswith("torch.nn."))
    return name in MODULES_OWN or (hidden and name not in _WHOLES)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name != WHOLE else path or name


class _Numbers(TorchFunctionMode):
    """Notes real tensors, which are neither parameters, buffers nor inputs: those are fake while a model is traced.

    constants: all of them; read: those of which a Python number was read.
    """

    def __init__(self, constants: dict[int, torch.Tensor], read: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._constants, self._read = constants, read

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        for leaf in pytree.tree_iter((args, kwargs)):
            if type(leaf) in (torch.Tensor, nn.Parameter):
                self._constants[id(leaf)] = leaf
                if getattr(func, "__name__", "") in _READS_NUMBERS:
                    self._read[id(leaf)] = leaf
        return func(*args, **(kwargs or {}))


_READS_NUMBERS = frozenset((
    "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__",
    "__contains__", "is_nonzero", "equal", "allclose", "tensor", "__repr__", "__format__",
))  # fmt: skip


def check_kept(observed: Observed, constants: Mapping[str, Any]) -> None:
    """Refuse tensor attributes that forward() replaced and the program reads as constants; warn of the others."""
    known = {id(constant) for constant in constants.values()}
    for place, old in observed.kept.items():
        if id(old) in known:
            raise RefusedError(
                f"forward() replaces the tensor in attribute {place}",
                why="it is neither a parameter nor a buffer: the program would keep the value of the capture",
                fix="make it a buffer (register_buffer), which is carried from step to step",
            )
        warnings.warn(
            f"forward() assigns attribute {place}: a pipeline does not keep what it assigns",
            CaptureWarning,
            stacklevel=2,
        )


def _changed(reading: Reading, path: str) -> RefusedError:
    now = reading.now()
    was, became = described(reading.value), described(now)
    kept = isinstance(now, torch.Tensor) or reading.value is ABSENT or reading.value is None
    thing = reading.owner
    return RefusedError(
        f"forward() reads attribute {reading.place} and then changes it"
        if thing is not None
        else f"forward() changes {reading.place}",
        where=f"module {path or '(the model itself)'} ({type(thing).__name__})" if isinstance(thing, nn.Module) else "",
        why=f"it was {was} and becomes {became if became != was else 'something else'}; a pipeline runs the program "
        "that was captured once, in which it would keep its first value",
        fix="call the model once on a batch before compile, if it is only filled at the first call; state that changes "
        "with every call belongs into a buffer (register_buffer)"
        if kept
        else "keep it in a buffer (register_buffer) and change that in place, or count in the training loop and pass "
        "the number with the batch; random numbers come from torch",
    )

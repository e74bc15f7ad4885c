"""Compiled stages: the segments of a stage's code, as kernels that TorchInductor makes.

Segments are compiled as they are (`torch._inductor.standalone_compile`), without tracing Python again: a stage's code
is a pure function of flat tensors, and its parameters are arguments.  So segments with equal ops and tensors share one
code, and parameters stay the leaves that buckets and optimizers know.  TorchInductor keeps its kernels on disk, for
other ranks and later runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopart.ir.graph import Op
from autopart.rng import keyed, keyed_rows
from autopart.runtime.activity import patient
from autopart.runtime.stages.compiled_segment import Code, CompiledSegment, Form
from autopart.runtime.stages.stage_module import StageModule
from autopart.session.code.segments import segmented, text_of


class CompileWarning(UserWarning):
    """Ops that could not be compiled and run as they are."""


class Inductor:
    """Compiles the code of stages.  ops: of the captured graph, by name, for module paths and places of warnings."""

    def __init__(self, ops: Mapping[str, Op]) -> None:
        self._ops = ops
        self._made: dict[tuple[str, Form], Code | None] = {}
        self._reasons: set[str] = set()

    def compile(self, code: StageModule, arguments: Sequence[Any], device: torch.device) -> StageModule:
        """Return the code with compiled segments, made for arguments like these (`arguments_of`) on a device.

        Segments that cannot be compiled run as they are, with a warning.  Raises RefusedError as `segmented`.
        """
        paths = {name: op.module for name, op in self._ops.items()}
        module = segmented(code.module, paths, lambda body: CompiledSegment(body, self._code))
        met: list[tuple[CompiledSegment, Sequence[torch.Tensor]]] = []
        with torch.enable_grad():
            with FakeTensorMode() as mode:
                given = [_fake(mode, arg, device) if isinstance(arg, torch.Tensor) else arg for arg in arguments]
                _Meeting(module, met).run(*given)
            for segment, inputs in met:
                segment.prepare(inputs)
        return replace(code, module=module)

    def _code(self, body: fx.GraphModule, inputs: Sequence[torch.Tensor], form: Form) -> Code | None:
        key = text_of(body), form
        if key not in self._made:
            try:
                self._made[key] = _compiled(body, inputs)
            except Exception as error:  # of any kind: what a compiler raises is not documented
                self._made[key] = None
                self._warn(body, error)
        return self._made[key]

    def _warn(self, body: fx.GraphModule, error: Exception) -> None:
        names = [node.name for node in body.graph.nodes if node.name in self._ops]
        named = next((name for name in names if name in str(error)), names[0] if names else "")
        op = self._ops.get(named)
        place = f"{op.target} in {op.module or 'the model'} ({op.where})" if op is not None else "a segment"
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if reason in self._reasons:  # equal layers may differ in which of their inputs need a gradient
            return
        self._reasons.add(reason)
        warnings.warn(f"{len(names)} ops from {place} on run without compiling: {reason}", CompileWarning, stacklevel=2)


def arguments_of(
    code: StageModule,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, torch.Tensor],
    trained: Collection[str],
) -> list[Any]:
    """Return arguments for the code of a stage on the meta device, with the flags that they have in a training step.

    tensors: the model's.  specs: shapes of values, as meta tensors.  trained: inputs that get a gradient.
    """
    found: list[Any] = []
    for name in code.params:
        parameter, dtype = code.casts.get(name, (name, None))
        given = code.constants.get(parameter, tensors.get(parameter))
        assert given is not None
        found.append(_like(given, dtype or given.dtype, given.requires_grad))
    found += [_like(specs[name], specs[name].dtype, name in trained) for name in code.inputs]
    return [*found, *(1.0 for _ in code.numbers)]


def _like(tensor: torch.Tensor, dtype: torch.dtype, trained: bool) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return made.requires_grad_(trained)


def _compiled(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code:
    from torch._inductor.standalone_compile import standalone_compile  # takes seconds to import

    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = [_fake(mode, t, t.device) for t in inputs]
    with patient("compiling the stages"):
        return standalone_compile(body, given, dynamic_shapes="from_example_inputs", fake_mode=mode, options={})


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a leaf without memory that has the form of a tensor."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


class _Meeting(fx.Interpreter):
    """Runs code on fake tensors, and notes what reaches each compiled segment."""

    def __init__(self, module: fx.GraphModule, met: list[tuple[CompiledSegment, Sequence[torch.Tensor]]]) -> None:
        super().__init__(module)
        self._met = met

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is keyed:
            return args[0](*args[2:], **kwargs)
        if target is keyed_rows:
            return args[0](*args[5:], **kwargs)
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, CompiledSegment):
            self._met.append((called, args))
        body = getattr(called, "body", None)
        if isinstance(body, fx.GraphModule):  # of a segment or a recomputed group
            return _Meeting(body, self._met).run(*args)
        return called(*args, **kwargs)

"""Compiled stages: the segments of a stage's code, as kernels that TorchInductor makes.

Segments are compiled as they are (`torch._inductor.standalone_compile`), without tracing Python again: a stage's code
is a pure function of flat tensors, and its parameters are arguments.  So segments with equal ops and tensors share one
code, and parameters stay the leaves that buckets and optimizers know.  TorchInductor keeps its kernels on disk, for
other ranks and later runs.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from autopart.extras.compiled.segments import segmented
from autopart.ir.graph import Op
from autopart.runtime.activity import patient
from autopart.runtime.stages.compiled_segment import Code, CompiledSegment, Form, form_of
from autopart.runtime.stages.stage_module import StageModule
from autopart.stagecode.stage_graph import text_of


class CompileWarning(UserWarning):
    """Ops that could not be compiled and run as they are."""


class Inductor:
    """Compiles the code of stages.  ops: of the captured graph, by name, for module paths and places of warnings."""

    def __init__(self, ops: Mapping[str, Op]) -> None:
        self._ops = ops
        self._made: dict[tuple[str, Form], Code | None] = {}
        self._reasons: set[str] = set()

    def compile(
        self,
        code: StageModule,
        tensors: Mapping[str, torch.Tensor],
        specs: Mapping[str, torch.Tensor],
        trained: Collection[str],
        device: torch.device,
    ) -> StageModule:
        """Return the code with compiled segments, made for what it is given in a training step.

        tensors: the model's.  specs: shapes of values, as meta tensors.  trained: inputs that get a gradient.
        Segments that cannot be compiled run as they are, with a warning.  Raises RefusedError as `segmented`.
        """
        paths = {name: op.module for name, op in self._ops.items()}
        module = segmented(code.module, paths, lambda body: CompiledSegment(body, partial(self._code, text_of(body))))
        met: list[tuple[CompiledSegment, Sequence[torch.Tensor]]] = []
        with torch.enable_grad():
            with FakeTensorMode():
                given = [_like(*how, device) for how in _forms(code, tensors, specs, trained)]
                _Meeting(module, met, device).run(*given, *(1.0 for _ in code.numbers))
            for segment, inputs in met:
                segment.prepare(inputs)
        return replace(code, module=module)

    def _code(self, text: str, body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code | None:
        """Return the code of a segment for tensors of this form.  text: of its ops, equal for equal segments."""
        key = text, form_of(inputs)
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


def _forms(
    code: StageModule,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, torch.Tensor],
    trained: Collection[str],
) -> Iterator[tuple[torch.Tensor, torch.dtype, bool]]:
    """Yield for each tensor that the code takes: one of its shape and strides, its dtype, and whether it is trained."""
    for name in code.params:
        parameter, dtype = code.casts.get(name, (name, None))
        given = code.constants[name] if name in code.constants else tensors[parameter]
        yield given, dtype or given.dtype, given.requires_grad
    for name in code.inputs:
        yield specs[name], specs[name].dtype, name in trained


def _like(tensor: torch.Tensor, dtype: torch.dtype, trained: bool, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    return made.requires_grad_(trained)


def _compiled(body: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Code:
    from torch._inductor.standalone_compile import standalone_compile  # takes seconds to import

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        given = [_like(tensor, tensor.dtype, tensor.requires_grad, tensor.device) for tensor in inputs]
    with patient("compiling the stages"):
        return standalone_compile(body, given, dynamic_shapes="from_example_inputs", fake_mode=mode, options={})


class _Meeting(fx.Interpreter):
    """Runs code on fake tensors, and notes what reaches each compiled segment.

    Ops that have another form in the code than in the capture (random ops; kernels that refuse fake tensors of some
    dtypes) are not run: the capture knows their results.
    """

    def __init__(
        self, module: fx.GraphModule, met: list[tuple[CompiledSegment, Sequence[torch.Tensor]]], device: torch.device
    ) -> None:
        super().__init__(module)
        self._met, self._device = met, device

    def run_node(self, n: fx.Node) -> Any:
        plain = isinstance(n.target, torch._ops.OpOverload) or n.target is operator.getitem
        if n.op == "call_function" and not plain and "val" in n.meta:
            trained = any(getattr(self.env[arg], "requires_grad", False) for arg in n.all_input_nodes)
            return pytree.tree_map_only(torch.Tensor, partial(self._known, trained), n.meta["val"])
        return super().run_node(n)

    def _known(self, trained: bool, result: torch.Tensor) -> torch.Tensor:
        return _like(result, result.dtype, trained and result.is_floating_point(), self._device)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called = self.fetch_attr(target)
        if isinstance(called, CompiledSegment):
            self._met.append((called, args))
        body = getattr(called, "body", None)
        if isinstance(body, fx.GraphModule):  # of a segment or a recomputed group
            return _Meeting(body, self._met, self._device).run(*args)
        return called(*args, **kwargs)

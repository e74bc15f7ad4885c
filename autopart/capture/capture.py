"""One capture, step by step: check, export, lower, name, read."""

from __future__ import annotations

import contextlib
import linecache
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad
from torch.export.graph_signature import OutputKind
from torch.fx import graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from autopart.batch.batch import Batch
from autopart.capture.gc_pause import gc_paused
from autopart.capture.python.guards import check_aliased_buffers, check_autocast
from autopart.capture.python.habits.checkpointing import checkpointed
from autopart.capture.python.habits.habits import patched
from autopart.capture.python.reads.host_reads import Questions, WholeBatchAsked
from autopart.capture.python.watch.observed import Observed
from autopart.capture.python.watch.restored import left_as_it_was
from autopart.capture.trace.autocast import Autocast, brought_back, moved
from autopart.capture.trace.export import LossFn, Wrapper, explained, export, quiet
from autopart.capture.trace.lower import lower
from autopart.capture.trace.to_graph import Names, NumberOfData, read_graph, read_names
from autopart.capture.trained import on_meta
from autopart.ir.errors import AutopartError, CaptureError, RefusedError
from autopart.ir.graph import Graph, Size

_one_at_a_time = threading.RLock()
"""Tracing patches classes of torch while it lasts.  Another thread that captures waits; one that only uses torch is not
affected, since patches act on the tracing thread only."""

_NODE_BYTES = 12 << 10
"""Bytes of host memory of a captured program for each of its nodes, with the graph and names that are kept beside it:
10 to 12 KB in captures of GPT-2 and T5."""

_SOURCES: dict[str, str] = graph_module._loader.eval_cache
"""The sources of generated code, which torch.fx keeps for the life of the process, for tracebacks."""
_GENERATED = "<eval_with_key>"


@dataclass(frozen=True)
class Captured:
    """A model captured at one shape.

    module: the flat fx graph.  graph: the same program as data.  names: which node is which.  outputs: makes of the
    results of a `predict` program what the model returns; None for a loss.  observed: what forward() read of Python.
    questions: what it asked about the numbers of the whole batch, with the answers that this program is for.
    masks: what its attention masks hide.  checkpointed: groups of ops that the model itself wants to recompute in the
    backward.  on_meta: whether it was traced on the meta device, as a program that is planned and never run.
    """

    module: fx.GraphModule
    graph: Graph
    names: Names
    outputs: Callable[[Sequence[torch.Tensor]], Any] | None
    observed: Observed
    questions: Questions | None
    masks: tuple[str, ...]
    checkpointed: tuple[tuple[str, ...], ...]
    on_meta: bool = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters, buffers and lifted constants, by name."""
        return self.names.tensors

    @property
    def program_bytes(self) -> int:
        """Estimated bytes of host memory that the program holds, without tensors; equal for equal programs."""
        return _NODE_BYTES * len(self.module.graph.nodes)

    @property
    def constants(self) -> dict[int, int]:
        """Bytes of the tensors that are neither parameters nor buffers, by the address of their memory."""
        lifted = [self.tensors[param.name] for param in self.graph.params if param.kind == "constant"]
        storages = [t.untyped_storage() for t in lifted if t.layout is torch.strided and not t.is_meta]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    size: Size | None = None,
    loss_fn: LossFn | None = None,
    mode: str = "step",
    whole: Callable[[], Captured] | None = None,
    autocast: Autocast | None = None,
    values_come: bool = False,
) -> Captured:
    """Capture a model for micro-batches of `size` shaped like `batch`; None is the size of the batch itself.

    mode: "step" (loss and gradients, with the training flags that the model has), "loss" (loss in eval mode) or
    "predict" (what the model returns, in eval mode).  whole: gives the capture of the whole batch, needed if the
    model's Python asks about its numbers.  autocast: the region that the model and its loss run in.  values_come:
    whether a model on the meta device gets values later; then it is traced as on the CPU, without memory for them.
    `check_model` must have passed the model; it is left unchanged.  Raises CaptureError, RefusedError.
    """

    modules = [part for part in (model, loss_fn) if isinstance(part, nn.Module)]

    def made(batch: Batch) -> Captured:
        return _settled(modules, lambda: _capture(model, batch, size, loss_fn, mode, autocast, values_come))

    try:
        return made(batch)
    except WholeBatchAsked:
        if whole is None:
            whole = partial(
                capture, model, batch, loss_fn=loss_fn, mode=mode, autocast=autocast, values_come=values_come
            )
        found = whole()
        batch = replace(batch, answers=found.questions.answers if found.questions is not None else ())
        return replace(made(batch), questions=found.questions)


def _settled(modules: Sequence[nn.Module], make: Callable[[], Captured]) -> Captured:
    with _one_at_a_time, gc_paused(), _forgotten_sources(), left_as_it_was(modules) as settle:
        first = make()
        if not first.observed.changed:
            return first
        # A first call may change something once: complete a configuration, install hooks when they are first needed.
        # Then a second call changes nothing more, and gives the same program.
        settle()
        second = make()
        if second.observed.changed or second.graph.shape_digest() != first.graph.shape_digest():
            raise first.observed.changed[0]
        return second


def _capture(
    model: nn.Module,
    batch: Batch,
    size: Size | None,
    loss_fn: LossFn | None,
    mode: str,
    autocast: Autocast | None,
    values_come: bool,
) -> Captured:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    comes = values_come and on_meta([part for part in (model, loss_fn) if isinstance(part, nn.Module)])
    if comes:
        device = torch.device("cpu")
    there = device if autocast is None or autocast.device_type == device.type else torch.device(autocast.device_type)
    check_autocast(device.type if device.type != "meta" else "cpu")
    sample = batch.with_rows(size.rows if size is not None else batch.rows or 1).to(device)
    wrapper = Wrapper(model, sample, batch, loss_fn, wants_outputs=mode == "predict", autocast=autocast)
    with patched(), _transforms_closed():
        traced = moved(wrapper, sample, there) if there != device or comes else contextlib.nullcontext(sample)
        flags = _training_flags(wrapper, model, evaluate=mode != "step")
        with quiet(), flags, _use_lazy_graph_module(True), traced as given:  # code is made when it runs
            program, module = _lowered(model, export(wrapper, given))
        if there != device:
            brought_back(module, device)
        _refuse_changed_parameters(program)
        outputs = _outputs_by_ops(program, module)
        names = read_names(program, module, wrapper, sample)
        check_aliased_buffers(model, names.updates.keys())
        try:
            graph = read_graph(module, names, outputs, Size(sample.rows or 1), backward=mode == "step")
        except NumberOfData as error:
            fallback = CaptureError(error.what, where=error.where, why=error.why, fix=error.fix)
            raise wrapper.asker.refusal or fallback from None
    module.recompile()
    asker, masks, groups = wrapper.asker, tuple(wrapper.asker.masks.found), checkpointed(module.graph)
    planned_only = not values_come and any(tensor.is_meta for tensor in names.tensors.values())
    return Captured(
        module, graph, names, wrapper.seen.outputs, wrapper.observed, asker.questions, masks, groups, planned_only
    )


def _lowered(
    model: nn.Module, exported: torch.export.ExportedProgram
) -> tuple[torch.export.ExportedProgram, fx.GraphModule]:
    try:
        return lower(exported)
    except AutopartError:
        raise
    except Exception as error:
        check_aliased_buffers(model)  # the likely reason: buffers that share memory, changed in place
        raise explained(error, model) from error


@contextlib.contextmanager
def _transforms_closed() -> Iterator[None]:
    """Close the levels of torch.func and of forward-mode derivatives that a failed capture leaves open: everything that
    this process does later would run inside them."""
    functorch: Any = torch._C._functorch
    depth, dual = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    except BaseException:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if dual < 0:  # none was open
            with contextlib.suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
            forward_ad._current_level = dual
        raise


@contextlib.contextmanager
def _training_flags(wrapper: nn.Module, model: nn.Module, *, evaluate: bool) -> Iterator[None]:
    """Set eval mode inside if wanted, and give every module its own training flag back."""
    saved = [(module, module.training) for module in model.modules()]
    wrapper.training = model.training and not evaluate
    if evaluate:
        model.eval()
    try:
        yield
    finally:
        for module, flag in saved:
            module.training = flag


def _refuse_changed_parameters(program: torch.export.ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise RefusedError(
                f"forward() changes parameter {(spec.target or '').removeprefix('model.')} in place",
                why="every micro-batch would change it again, and its gradient belongs to the value before; an "
                "embedding with max_norm= does so",
                fix="change it between steps, under torch.no_grad(): for an embedding leave out max_norm= and "
                "renormalise its weight after optimizer.step()",
            )


def _outputs_by_ops(program: torch.export.ExportedProgram, module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of the user outputs, each written by an op.

    A result, or a buffer's new value, that is an input or parameter itself becomes a copy of it.
    """
    final = module.graph.output_node()
    own = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs if spec.target is not None}
    results: list[Any] = list(final.args[0])  # type: ignore[arg-type]
    chosen: list[fx.Node] = []
    for place, spec in enumerate(program.graph_signature.output_specs):
        node = results[place]
        changed = spec.kind is OutputKind.BUFFER_MUTATION and node.name != own.get(spec.target)
        wanted = spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
        if node.op == "placeholder" and (wanted or changed):
            with module.graph.inserting_before(final):
                copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta.update(node.meta)
            results[place] = node = copy
        if wanted:
            chosen.append(node)
    final.args = (tuple(results),)
    return chosen


@contextlib.contextmanager
def _forgotten_sources() -> Iterator[None]:
    """Forget the sources of what the body generates: some fifty programs for one capture, of which one is used."""
    before = set(_SOURCES)
    try:
        yield
    finally:
        for name in [name for name in _SOURCES if name.startswith(_GENERATED) and name not in before]:
            del _SOURCES[name]
            linecache.cache.pop(name, None)

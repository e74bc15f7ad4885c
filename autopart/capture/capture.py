"""One capture, step by step: guard, export, lower, name, read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn
from torch.export.graph_signature import OutputKind

from autopart.capture.batch.batch import Batch
from autopart.capture.batch.questions import Questions, WholeBatchAsked
from autopart.capture.gc_pause import gc_paused
from autopart.capture.guards import check_aliased_buffers, check_autocast
from autopart.capture.habits.autocast import Autocast, known_everywhere
from autopart.capture.habits.checkpointing import checkpointed
from autopart.capture.reads.host_reads import Asker
from autopart.capture.trace.export import LossFn, OutputSpec, Wrapper, explained, export, quiet
from autopart.capture.trace.fake_device import brought_back, moved
from autopart.capture.trace.lower import lower
from autopart.capture.trace.names import Names, read_names
from autopart.capture.trace.to_graph import NumberOfData, read_graph
from autopart.capture.watch.observed import Observed
from autopart.capture.watch.restored import left_as_it_was
from autopart.ir.errors import AutopartError, CaptureError, RefusedError
from autopart.ir.graph import Graph
from autopart.ir.size import Size

_one_at_a_time = threading.RLock()
"""Tracing patches classes of torch for as long as it lasts.  Another thread that captures waits; one that only uses
torch is not affected, as the patches let it through."""


@dataclass(frozen=True)
class Captured:
    """A model at one shape.  module: the flat fx graph; graph: the same as data; names: which node is which;
    outputs: how a `predict` program's results become what the model returns, None for a loss program; observed: what
    forward() read of the modules' attributes; questions: what it asked about the numbers of the whole batch, with the
    answers that this program is for; checkpointed: groups of ops that the model itself wants to compute again in the
    backward."""

    module: fx.GraphModule
    graph: Graph
    names: Names
    outputs: OutputSpec | None
    observed: Observed = field(default_factory=Observed)
    questions: Questions | None = None
    checkpointed: tuple[tuple[str, ...], ...] = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's own parameters and buffers, and lifted constants, by name."""
        return self.names.tensors

    @property
    def on_meta(self) -> bool:
        """Whether the model has shapes and no values: it can be planned and not be run."""
        return any(tensor.is_meta for tensor in self.tensors.values())


def capture(
    model: nn.Module,
    batch: Batch,
    *,
    size: Size | None = None,
    loss_fn: LossFn | None = None,
    mode: str = "step",
    whole: Callable[[], Captured] | None = None,
    autocast: Autocast | None = None,
) -> Captured:
    """Capture a model for micro-batches of `size` shaped like `batch`; None is the size of the batch itself.

    mode: "step" (loss and gradients, with the training flags the model has), "loss" (loss in eval mode) or "predict"
    (what the model returns, in eval mode).  whole: gives the capture of all of the batch, wanted where the model's
    Python asks about its numbers.  autocast: that the model and its loss run in.  The model is left as it was;
    `check_model` has passed it, before its library could install hooks of its own while it is traced.  Raises
    CaptureError, RefusedError.
    """
    try:
        return _settled(model, batch, size, loss_fn, mode, autocast)
    except WholeBatchAsked:
        found = whole() if whole is not None else capture(model, batch, loss_fn=loss_fn, mode=mode, autocast=autocast)
        batch = replace(batch, answers=found.questions.answers if found.questions is not None else ())
        return replace(_settled(model, batch, size, loss_fn, mode, autocast), questions=found.questions)


def _settled(
    model: nn.Module, batch: Batch, size: Size | None, loss_fn: LossFn | None, mode: str, autocast: Autocast | None
) -> Captured:
    with _one_at_a_time, _left_as_they_were(model, loss_fn) as settle:
        first = _capture(model, batch, size, loss_fn, mode, autocast)
        if not first.observed.changed:
            return first
        # A first call may settle something for good, as a configuration that is completed, or hooks that a library
        # installs when they are first needed.  Then a second one changes nothing more, and is the same program.
        settle()
        second = _capture(model, batch, size, loss_fn, mode, autocast)
        if second.observed.changed or second.graph.shape_digest() != first.graph.shape_digest():
            raise first.observed.changed[0]
        return second


def _capture(
    model: nn.Module, batch: Batch, size: Size | None, loss_fn: LossFn | None, mode: str, autocast: Autocast | None
) -> Captured:
    meta = any(p.is_meta for p in model.parameters())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    check_autocast(device.type if not meta else "cpu")
    sample = batch.with_rows(size.rows if size is not None else batch.rows or 1)
    sample = sample.to(device)
    wrapper = Wrapper(model, sample, loss_fn, wants_outputs=mode == "predict", autocast=autocast)
    reads_on = device if device.type != "meta" else torch.device("cpu")
    asker = Asker(wrapper, model, batch, sample.rows, reads_on)
    with _one_at_a_time, gc_paused(), known_everywhere():
        with quiet(), _flags(wrapper, model, evaluate=mode != "step"):
            if autocast is None or autocast.device_type == device.type:
                program, module = _lowered(model, export(wrapper, sample, asker))
            else:
                with moved(wrapper, sample, torch.device(autocast.device_type)) as there:
                    program, module = _lowered(model, export(wrapper, there, asker))
                brought_back(module, device)
        _refuse_changed_parameters(program)
        outputs = _outputs_by_ops(program, module)
        names = read_names(program, module, wrapper, sample)
        check_aliased_buffers(model, names.updates.keys())
        try:
            graph = read_graph(module, names, outputs, Size(sample.rows or 1), backward=mode == "step")
        except NumberOfData as error:
            raise asker.refusal or CaptureError(error.what, where=error.where, why=error.why, fix=error.fix) from None
    again = checkpointed(module.graph)
    return Captured(module, graph, names, wrapper.outputs, wrapper.observed, asker.questions, again)


@contextlib.contextmanager
def _left_as_they_were(*parts: object) -> Iterator[Callable[[], None]]:
    """`left_as_it_was` of the model, and of a loss function that is a module."""
    with contextlib.ExitStack() as before:
        settles = [before.enter_context(left_as_it_was(part)) for part in parts if isinstance(part, nn.Module)]

        def settle() -> None:
            for one in settles:
                one()

        yield settle


def _lowered(
    model: nn.Module, exported: torch.export.ExportedProgram
) -> tuple[torch.export.ExportedProgram, fx.GraphModule]:
    try:
        return lower(exported)
    except AutopartError:
        raise
    except Exception as error:
        check_aliased_buffers(model)  # the likely reason: buffers that are one, changed in place
        raise explained(error, model) from error


class _flags:
    """Eval mode inside, every module's own training flag back outside."""

    def __init__(self, wrapper: nn.Module, model: nn.Module, *, evaluate: bool) -> None:
        self._model, self._wrapper, self._evaluate = model, wrapper, evaluate

    def __enter__(self) -> None:
        self._saved = [(m, m.training) for m in self._model.modules()]
        self._wrapper.training = self._model.training and not self._evaluate
        if self._evaluate:
            self._model.eval()

    def __exit__(self, *_: object) -> None:
        for module, flag in self._saved:
            module.training = flag


def _refuse_changed_parameters(program: torch.export.ExportedProgram) -> None:
    for spec in program.graph_signature.output_specs:
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise RefusedError(
                f"forward() changes parameter {(spec.target or '').removeprefix('model.')} in place",
                why="every micro-batch would change it anew, and its gradient belongs to the value before; an "
                "embedding with max_norm= does so",
                fix="change it between steps, under torch.no_grad(): for an embedding leave out max_norm= and "
                "renormalise its weight after optimizer.step()",
            )


def _outputs_by_ops(program: torch.export.ExportedProgram, module: fx.GraphModule) -> list[fx.Node]:
    """The nodes of the user outputs.  A result, or a buffer's new value, that is an input or parameter itself becomes
    a copy of it, so that every one is written by an op."""
    final = next(node for node in module.graph.nodes if node.op == "output")
    own = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs if spec.target is not None}
    results = list(final.args[0])
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

"""The list of Python habits that tracing would lose, and all that is replaced in torch and Python while tracing.

A habit replaces parts of torch or Python while the model is traced (`patches`), or runs around the traced forward()
(`around`).  Replacements act only on the thread that traces; other threads find torch as it is.
How attributes are read and assigned is replaced too, by `watch.observed`.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import pkgutil
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import proxy
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.utils._device import _device_constructors
from torch.utils._traceback import CapturedTraceback

from autopart.capture.python.habits import all_sizes, calls, checkpointing, custom_functions, own_tensors, randomness
from autopart.capture.python.reads import host_reads
from autopart.passes.ops.row import OpRow
from autopart.passes.ops.table import has_row, op_name, registered


@dataclass(frozen=True, slots=True)
class Habit:
    """One habit.  sees: in words, and what becomes of it; test: breaks without it.

    patches: by the dotted name of what is replaced, a function that is called with the original first, or a value.
    """

    sees: str
    test: str
    patches: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Sequence[nn.Module]], AbstractContextManager[Any]] | None = None


HABITS = (
    Habit(
        "random and numpy.random draw numbers: refused, unless forward() has seeded the generator",
        test="capture/test_refusals.py::test_numbers_drawn_before_forward_seeds_its_generator_are_refused_at_their_line",
        patches=dict(randomness.functions()),
        around=randomness.no_random_numbers,
    ),
    Habit(
        "parameters are used that are not the model's own, or change through .data: refused",
        test="capture/test_refusals.py::test_a_parameter_changed_through_data_is_refused_by_name_and_line",
        around=own_tensors.OwnParametersOnly,
    ),
    Habit(
        "a new tensor is assigned to a buffer: written into the old one",
        test="capture/test_capture.py::test_buffers_end_as_the_plain_models",
        around=own_tensors.assigned_buffers,
    ),
    Habit(
        "a custom autograd.Function is applied, whose backward torch.export drops: an op with its own backward",
        test="capture/trace/test_custom_functions.py::test_the_gradients_of_its_own_backward_are_kept_in_stages",
        patches={"torch.autograd.function._SingleLevelFunction.apply": custom_functions.apply},
    ),
    Habit(
        "torch.utils.checkpoint: its ops are a group to recompute; the reentrant kind is ignored with a warning",
        test="capture/trace/test_checkpointing.py::test_each_call_is_a_group_and_the_outer_one_counts",
        patches={
            "torch.utils.checkpoint.CheckpointFunction.apply": checkpointing.run_reentrant,
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator": checkpointing.mark,
        },
    ),
    Habit(
        "inference mode is entered: traced as no_grad; backward() and gradient hooks on tensors: refused",
        test="users/test_bad_input.py::test_a_model_that_cannot_be_exact_is_refused_with_the_reason",
        patches={
            "torch.inference_mode.__enter__": calls.enter_no_grad,
            "torch.inference_mode.__exit__": calls.leave_no_grad,
            "torch.autograd.backward": calls.refuse_backward,
            "torch.Tensor.backward": calls.refuse_backward,
            "torch.Tensor.register_hook": calls.refuse_hook,
        },
    ),
    Habit(
        "modules are converted to what they are, torch.distributions check arguments, which can only raise (where they "
        "would have stopped at a NaN, the loss is NaN), masks are tested for being causal: skipped",
        test="capture/trace/test_no_effect.py::"
        "test_a_conversion_to_what_it_is_and_checks_of_distributions_leave_the_program_alone",
        patches={
            "torch.nn.Module._apply": calls.convert_module,
            "torch.distributions.Distribution._validate_args": False,
            "torch.nn.modules.transformer._detect_is_causal_mask": calls.causal_as_hinted,
        },
    ),
    Habit(
        "sequences are packed by their lengths: refused",
        test="capture/test_refusals.py::test_packed_sequences_are_refused_and_the_advice_is_exact",
        patches={"torch._VF._pack_padded_sequence": calls.refuse_packing},
    ),
    Habit(
        "a mask is sliced to the length that it has: recorded like a slice of a longer one",
        test="session/stagecode/test_token_slices.py::test_a_mask_buffer_of_just_the_sequence_length_is_sliced_exactly",
        around=all_sizes.KeptSlices,
    ),
    Habit(
        "questions about the numbers of the batch: answered",
        test="capture/python/test_questions.py::test_what_is_asked_of_the_batch_is_exact_for_every_batch",
        patches={
            "torch.fx.experimental.proxy_tensor.proxy_call": host_reads.proxy_call,
            "torch._subclasses.fake_tensor.FakeTensor.tolist": host_reads.tolist,
            "torch.tensor": host_reads.tensor,
        },
    ),
)

_composite: dict[tuple[frozenset[str], tuple[OpRow, ...]], frozenset[Any]] = {}
"""The composite ops that stay whole, which it takes long to find, by the composite ops and the rows of the table that
are registered: a library may register more at any time."""


def _known_composite_ops(original: Callable[[], set[Any]]) -> set[Any]:
    """Return those of torch's composite ops that stay whole: those that the table of ops knows.

    Others become what they are made of: an alias (`torch.concat`) the op that it stands for.  Two kinds stay whole
    without a row: ops of linear algebra, whose parts return errors as numbers that nothing in the graph would read, and
    random ops, which are called by key and whose parts fill tensors that their backward reads.
    """
    composite = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    key = (composite, registered())
    if key not in _composite:
        random = torch.Tag.nondeterministic_seeded
        _composite.clear()
        _composite[key] = frozenset(
            op for op in original() if has_row(str(op)) or random in op.tags or op_name(str(op)).startswith("linalg_")
        )
    return set(_composite[key])


class _ForwardFrames(CapturedTraceback):
    """The frames of a stack that torch.fx keeps of it for an op, without the names and lines of some eighty others."""

    def __init__(self, frame: types.FrameType | None) -> None:
        super().__init__(None)
        anchors = getattr(proxy, "_STACK_TRACE_ANCHORS", ())
        self._frames: list[traceback.FrameSummary] = []
        while frame is not None:
            code, name = frame.f_code, frame.f_code.co_name
            file = code.co_filename
            if name == "forward" or file.endswith("torch/__init__.py") or (file, name) in anchors:
                self._frames.append(traceback.FrameSummary(file, frame.f_lineno, name))
            frame = frame.f_back

    def summary(self) -> traceback.StackSummary:
        """Return the frames, the innermost last."""
        return traceback.StackSummary.from_list(self._frames[::-1])


def _extracted(original: Callable[..., Any], **how: Any) -> Any:
    return original(**how) if how else _ForwardFrames(sys._getframe(2))


def _one_step(original: Callable[..., Any], tokens: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Return fake results of a recurrent layer, by one step of it: torch would take every one to know their shapes.

    Where its steps become ops of the program, it takes them all.
    """
    if not isinstance(tokens, FakeTensor) or proxy_tensor.get_proxy_mode() is not None or len(tokens) < 2:
        return original(tokens, *args, **options)
    step, last = original(tokens[:1], *args, **options)
    return torch.cat([step] * len(tokens)), last


PATCHES: tuple[tuple[str, Any], ...] = (
    *(patch for habit in HABITS for patch in habit.patches.items()),
    ("torch.utils._traceback.CapturedTraceback.extract", _extracted),
    ("torch._decomp.decompositions.one_layer_rnn", _one_step),
    ("torch._decomp.decompositions.one_layer_lstm", _one_step),
    ("torch.export._trace.print", lambda *_, **__: None),  # export prints a half-made graph
    ("torch.export.exported_program._collect_all_valid_cia_ops", _known_composite_ops),
    # of an exported program the graph is read, and its code never runs: it is made when it is asked for
    ("torch.export.exported_program._create_graph_module_for_export", lambda _, *parts: _LazyGraphModule(*parts)),
    # torch would switch off autocast for CUDA without a device; tracing needs only its rules
    ("torch.cuda.amp.common.amp_definitely_not_available", lambda original: False),
    ("torch.cuda.is_bf16_supported", lambda original, *args: not torch.cuda.is_available() or original(*args)),
)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Put all patches in place inside.  One thread at a time."""
    tracer = threading.get_ident()
    _device_constructors()  # kept for ever from the first call on: torch.tensor must not be replaced in it
    with contextlib.ExitStack() as entered:
        for target, here in PATCHES:
            home, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(home)
            if callable(here):
                here = _on_thread(tracer, here, getattr(owner, name, getattr(builtins, name, None)))
            entered.enter_context(mock.patch.object(owner, name, here, create=hasattr(builtins, name)))
        yield


def _of_class(bound: Any) -> Callable[..., Any]:
    """Return a class method that is written in C, as a function of the class."""
    found: Any = inspect.getattr_static(bound.__self__, bound.__name__)
    return lambda cls, *args, **kwargs: found.__get__(None, cls)(*args, **kwargs)


def _on_thread(tracer: int, replacement: Callable[..., Any], otherwise: Any) -> Any:
    bound = isinstance(getattr(otherwise, "__self__", None), type)
    plain: Any = otherwise if not bound else getattr(otherwise, "__func__", None) or _of_class(otherwise)

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == tracer:
            return replacement(plain, *args, **kwargs)
        return plain(*args, **kwargs)

    return classmethod(call) if bound else call

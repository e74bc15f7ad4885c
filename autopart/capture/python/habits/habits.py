"""The list of Python habits that tracing would lose.

A habit acts in one or more of four ways: it replaces parts of torch or Python while the model is traced (`patches`),
runs around the traced forward() (`around`), rewrites the traced graph (`rewrite`), or reads groups of ops to recompute
from it (`groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from autopart.capture.python.habits import (
    autograd_calls,
    buffer_assignments,
    checkpointing,
    custom_functions,
    foreign_parameters,
    noop_conversions,
    packed_sequences,
    randomness,
    rejoined,
    whole_slices,
)


@dataclass(frozen=True, slots=True)
class Habit:
    """One habit.  file: in this folder; sees, does: in words; test: breaks without it.

    patches: by the dotted name of what is replaced, a function that is called with the original first, or a value.
    """

    file: str
    sees: str
    does: str
    test: str
    patches: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Sequence[nn.Module]], AbstractContextManager[Any]] | None = None
    rewrite: Callable[[fx.Graph], fx.Graph] | None = None
    groups: Callable[[fx.Graph], tuple[tuple[str, ...], ...]] | None = None


HABITS = (
    Habit(
        "randomness",
        sees="random and numpy.random draw numbers in forward(); they would be drawn once and kept",
        does="refuses it, unless forward() has seeded the generator",
        test="capture/test_refusals.py::test_numbers_drawn_before_forward_seeds_its_generator_are_refused_at_their_line",
        patches={target: randomness.checked(target) for target in randomness.functions()},
        around=randomness.no_random_numbers,
    ),
    Habit(
        "foreign_parameters",
        sees="parameters that are not the model's own are used, or parameters change through .data",
        does="refuses it with the line",
        test="capture/test_refusals.py::test_a_parameter_changed_through_data_is_refused_by_name_and_line",
        around=foreign_parameters.OwnParametersOnly,
    ),
    Habit(
        "buffer_assignments",
        sees="forward() assigns a new tensor to a buffer; torch.export puts the old one back",
        does="writes the new value into the old buffer",
        test="capture/test_capture.py::test_buffers_end_as_the_plain_models",
        around=buffer_assignments.assignments,
    ),
    Habit(
        "custom_functions",
        sees="a custom autograd.Function is applied; torch.export drops its backward",
        does="registers it as an op with its own backward",
        test="capture/test_custom_functions.py::test_the_gradients_of_its_own_backward_are_kept_in_stages",
        patches={"torch.autograd.Function.apply": custom_functions.apply},
    ),
    Habit(
        "packed_sequences",
        sees="sequences are packed by their lengths",
        does="refuses it with the line, and says how to do without",
        test="capture/test_refusals.py::test_packed_sequences_are_refused_and_the_advice_is_exact",
        patches={"torch._VF._pack_padded_sequence": packed_sequences.refuse},
    ),
    Habit(
        "checkpointing",
        sees="torch.utils.checkpoint is used; export would detach its results or trace its hooks",
        does="marks the ops of each call as a group to recompute; ignores the reentrant kind with a warning",
        test="capture/test_checkpointing.py::test_each_call_is_a_group_and_the_outer_one_counts",
        patches={
            "torch.utils.checkpoint.CheckpointFunction.apply": checkpointing.run_reentrant,
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator": checkpointing.mark,
        },
        groups=checkpointing.checkpointed,
    ),
    Habit(
        "autograd_calls",
        sees="inference mode, backward() or gradient hooks on tensors in forward(); export records none of them",
        does="traces inference mode as no_grad, and refuses the others",
        test="test_bad_input.py::test_a_model_that_cannot_be_exact_is_refused_with_the_reason",
        patches={
            "torch.inference_mode.__enter__": autograd_calls.enter_no_grad,
            "torch.inference_mode.__exit__": autograd_calls.leave_no_grad,
            "torch.autograd.backward": autograd_calls.refuse_backward,
            "torch.Tensor.backward": autograd_calls.refuse_backward,
            "torch.Tensor.register_hook": autograd_calls.refuse_hook,
        },
    ),
    Habit(
        "noop_conversions",
        sees="modules converted to what they are, checks of torch.distributions, masks tested for being causal",
        does="skips them: they change no number, but replace parameters or branch on numbers",
        test="capture/test_no_effect.py::"
        "test_a_conversion_to_what_it_is_and_checks_of_distributions_leave_the_program_alone",
        patches={
            "torch.nn.Module._apply": noop_conversions.apply_to_module,
            "torch.distributions.Distribution._validate_args": False,
            "torch.nn.modules.transformer._detect_is_causal_mask": noop_conversions.causal_as_hinted,
        },
    ),
    Habit(
        "rejoined",
        sees="a tensor taken apart row by row and joined again, torch.cat(list(x)); each number of rows differs",
        does="replaces the join by the tensor",
        test="capture/test_questions.py::test_what_is_asked_of_the_batch_is_exact_for_every_batch",
        rewrite=rejoined.rejoined,
    ),
    Habit(
        "whole_slices",
        sees="mask[:, :T] of a parameter or buffer of T elements; torch makes no op of it, but does of a longer one's",
        does="records the slice, so that all sequence lengths have the same program",
        test="session/test_token_slices.py::test_a_mask_buffer_of_just_the_sequence_length_is_sliced_exactly",
        around=whole_slices.KeptSlices,
    ),
)

"""The list of Python habits that tracing would lose.

A habit acts in one or more of four ways: it replaces parts of torch or Python while the model is traced (`patches`),
runs around the traced forward() (`around`), rewrites the traced graph (`rewrite`), or reads groups of ops to recompute
from it (`groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from autopart.capture.habits import (
    autograd_calls,
    buffer_assignments,
    checkpointing,
    custom_functions,
    foreign_parameters,
    noop_conversions,
    randomness,
    rejoined,
)


@dataclass(frozen=True, slots=True)
class Patch:
    """One part of torch or Python that is replaced while a model is traced.

    target: its dotted name.  replacement: a function that is called with the original first, or a plain value.  torch:
    the releases in which the target is known to exist.
    """

    target: str
    replacement: Any
    reason: str
    torch: str = "2.11+"


PRIVATE = "2.11 to 2.13"
"""Releases for a target that torch may rename without notice."""


@dataclass(frozen=True, slots=True)
class Habit:
    """One habit.  file: in this folder; sees, does: in words; test: breaks without it."""

    file: str
    sees: str
    does: str
    test: str
    patches: tuple[Patch, ...] = ()
    around: Callable[[Sequence[nn.Module]], AbstractContextManager[Any]] | None = None
    rewrite: Callable[[fx.Graph], fx.Graph] | None = None
    groups: Callable[[fx.Graph], tuple[tuple[str, ...], ...]] | None = None


HABITS = (
    Habit(
        file="randomness",
        sees="random and numpy.random draw numbers in forward()",
        does="refuses it, unless forward() has seeded the generator",
        test="tests/capture/test_refusals.py::test_numbers_drawn_before_forward_seeds_its_generator_are_refused_at_their_line",
        patches=tuple(
            Patch(target, randomness.checked(target), "Python's random numbers would be drawn once and kept")
            for target in randomness.functions()
        ),
        around=randomness.no_random_numbers,
    ),
    Habit(
        file="foreign_parameters",
        sees="parameters that are not the model's own are used, parameters change through .data",
        does="refuses it with the line",
        test="tests/capture/test_refusals.py::test_a_parameter_changed_through_data_is_refused_by_name_and_line",
        around=foreign_parameters.OwnParametersOnly,
    ),
    Habit(
        file="buffer_assignments",
        sees="forward() assigns a new tensor to a buffer",
        does="writes the new value into the old buffer, which torch.export carries over",
        test="tests/capture/test_capture.py::test_buffers_end_as_the_plain_models",
        around=buffer_assignments.assignments,
    ),
    Habit(
        file="custom_functions",
        sees="a custom autograd.Function is applied",
        does="registers it as an op with its own backward",
        test="tests/capture/test_custom_functions.py::test_the_gradients_of_its_own_backward_are_kept_in_stages",
        patches=(
            Patch(
                "torch.autograd.Function.apply",
                custom_functions.apply,
                "torch.export drops the backward of a custom function",
            ),
        ),
    ),
    Habit(
        file="checkpointing",
        sees="torch.utils.checkpoint is used",
        does="marks the ops of each call as a group to recompute; ignores the reentrant kind with a warning",
        test="tests/capture/test_checkpointing.py::test_each_call_is_a_group_and_the_outer_one_counts",
        patches=(
            Patch(
                "torch.utils.checkpoint.CheckpointFunction.apply",
                checkpointing.run_reentrant,
                "it would detach what it computes",
            ),
            Patch(
                "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
                checkpointing.mark,
                "the ops that the model checkpoints are marked",
                PRIVATE,
            ),
        ),
        groups=checkpointing.checkpointed,
    ),
    Habit(
        file="autograd_calls",
        sees="inference mode, backward() and gradient hooks on tensors in forward()",
        does="traces inference mode as no_grad, and refuses the others",
        test="tests/test_bad_input.py::test_a_model_that_cannot_be_exact_is_refused_by_name",
        patches=(
            Patch("torch.inference_mode.__enter__", autograd_calls.enter_no_grad, "torch.export only sees no_grad"),
            Patch("torch.inference_mode.__exit__", autograd_calls.leave_no_grad, "torch.export only sees no_grad"),
            Patch("torch.autograd.backward", autograd_calls.refuse_backward, "its gradients would be lost"),
            Patch("torch.Tensor.backward", autograd_calls.refuse_backward, "its gradients would be lost"),
            Patch("torch.Tensor.register_hook", autograd_calls.refuse_hook, "a hook would run once and never again"),
        ),
    ),
    Habit(
        file="noop_conversions",
        sees="modules converted to what they are, checks of torch.distributions, masks tested for being causal",
        does="skips them, since they change no number",
        test="tests/capture/test_no_effect.py::test_a_conversion_to_what_it_is_and_checks_of_distributions_leave_the_program_alone",
        patches=(
            Patch(
                "torch.nn.Module._apply",
                noop_conversions.apply_to_module,
                "a conversion would replace the parameters",
                PRIVATE,
            ),
            Patch(
                "torch.distributions.Distribution._validate_args",
                False,
                "the checks branch on the numbers of their arguments",
                PRIVATE,
            ),
            Patch(
                "torch.nn.modules.transformer._detect_is_causal_mask",
                noop_conversions.causal_as_hinted,
                "torch's transformers branch on the numbers of a mask",
                PRIVATE,
            ),
        ),
    ),
    Habit(
        file="rejoined",
        sees="a tensor taken apart row by row and joined again, torch.cat(list(x))",
        does="replaces the join by the tensor",
        test="tests/capture/test_questions.py::test_what_is_asked_of_the_batch_is_exact_for_every_batch",
        rewrite=rejoined.rejoined,
    ),
)

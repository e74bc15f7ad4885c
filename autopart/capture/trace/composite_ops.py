"""Composite ops: those that the table of ops knows stay whole, others become what they are made of.

So an alias (`torch.concat`) becomes the op that it stands for, and what is made of known ops is known.  Two kinds stay
whole without a row: ops of linear algebra, whose parts return errors as numbers that nothing in the graph would read,
and random ops, which are called by key and whose parts fill tensors that their backward reads.

What torch does with composite ops for each decomposition is done once: a third of the capture of a small model.  To
keep them whole, `run_decompositions` looks through all ops for them and gives each of some 200 a set of kernels while
it runs, the same every time.  Here both are remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict

from autopart.passes.ops.table import has_row, op_name

_known: dict[frozenset[str], set[Any]] = {}
"""torch's list of composite ops, by the composite ops that are registered: a library may register more at any time."""


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels of an op outside and inside of a decomposition.

    decomposition: what takes the op apart, or keeps it.  has_rule: whether fake tensors have a rule for the op outside.
    rule: the rule inside, None if torch adds none.
    """

    decomposition: Callable[..., Any]
    has_rule: bool
    outside: dict[Any, Any]
    inside: dict[Any, Any]
    rule: Any


_kernels: dict[Any, _Kernels] = {}


def known_composite_ops(original: Callable[[], set[Any]]) -> set[Any]:
    """Return those of torch's composite ops that stay whole."""
    registered = frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))
    if registered not in _known:
        _known.clear()
        _known[registered] = set(original())
    return {op for op in _known[registered] if _stays_whole(op)}


def _stays_whole(op: Any) -> bool:
    name = str(op)
    return has_row(name) or torch.Tag.nondeterministic_seeded in op.tags or op_name(name).startswith("linalg_")


@contextlib.contextmanager
def kept_whole(original: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Do what torch's context manager does: give each of these ops the kernels that keep it whole, or take it apart as
    said.  An op whose kernels were changed since the last time, and with it all ops, is left to torch again."""
    if not all(_is_as_it_was(op, decomposition) for op, decomposition in decompositions.items()):
        outside = {op: (op in op_implementations_dict, dict(op.py_kernels)) for op in decompositions}
        with original(decompositions):
            for op, (has_rule, kernels) in outside.items():
                rule = None if has_rule else op_implementations_dict.get(op)
                _kernels[op] = _Kernels(decompositions[op], has_rule, kernels, dict(op.py_kernels), rule)
            yield
        return
    try:
        for op in decompositions:
            _put(op, _kernels[op].inside)
            if _kernels[op].rule is not None:
                op_implementations_dict[op] = _kernels[op].rule
        yield
    finally:
        for op in decompositions:
            _put(op, _kernels[op].outside)
            op_implementations_dict.pop(op, None)  # as torch does, also where it had a rule before


def _is_as_it_was(op: Any, decomposition: Callable[..., Any]) -> bool:
    known = _kernels.get(op)
    return (
        known is not None
        and known.decomposition is decomposition
        and known.has_rule == (op in op_implementations_dict)
        and known.outside == op.py_kernels
    )


def _put(op: Any, kernels: dict[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()

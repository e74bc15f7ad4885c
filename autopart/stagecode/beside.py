"""What the code of a stage calls beside the captured ops, and in which states the ranks of a shard group read it.

A closed list.  Ops have strategies (`passes.shards.strategies`); what is written beside them has none, and a call whose
rule is not here could read a part where it needs all, silently: whoever writes a new one says here what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.passes.shards.states import CUT_KIND, WHOLE, State
from autopart.rng import in_order
from autopart.runtime.stages.slice_functions import counted, joined, last_of, part_of
from autopart.runtime.stages.stage_module import StateBuffer, of_whole_batch, weighed

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Reads:
    """In which state a call reads its first tensor, by the call and how that is held, and whether in the same the rest.

    alike: whether it reads the others as the first one; else whole.  None as a state: it cannot run on what is held.
    """

    first: Callable[[fx.Node, State], State | None]
    alike: bool = True


def _whole(call: fx.Node, held: State) -> State:
    """Read all of it: no sum of addends, nor join of parts, of what it returns is what it returns of the whole."""
    return WHOLE


def _as_held(call: fx.Node, held: State) -> State:
    """Read it as it is held: linear in each entry, so parts of the result come from parts, and addends from addends."""
    return held


def _along(call: fx.Node, held: State) -> State:
    """Read all entries of the axis that its second argument says, which it cuts or joins; linear."""
    return WHOLE if held.kind == CUT_KIND and held.axis == call.args[1] else held


def _padded(call: fx.Node, held: State) -> State:
    """Read all entries of every axis, since its zeros stand before the first of all; linear."""
    return WHOLE if held.kind == CUT_KIND else held


def _written(call: fx.Node, held: State) -> State | None:
    """Read it as it is held, with all tokens: the buffer is written in place, so nothing can be gathered for it."""
    place: Any = call.target
    return None if held.kind == CUT_KIND and held.axis == place.__self__.axis else held


_READS: Mapping[Any, Reads] = {
    in_order: Reads(_as_held),
    weighed: Reads(_whole),
    of_whole_batch: Reads(_whole),
    counted: Reads(_whole),
    part_of: Reads(_along),
    joined: Reads(_along),
    last_of: Reads(_along),
    _aten.slice.Tensor: Reads(_along),
    _aten.constant_pad_nd.default: Reads(_padded),
    _aten.add.Tensor: Reads(_as_held),
    _aten.mul.Tensor: Reads(_as_held, alike=False),
    _aten.div.Tensor: Reads(_as_held, alike=False),
    StateBuffer.append: Reads(_written),
}


def states_beside(call: fx.Node, held: State) -> tuple[State, State] | None:
    """Return the states in which a call reads its first tensor, whose result has the same, and all others; None for one
    that the list lacks, or that cannot run on what is held.  held: of the first tensor."""
    rule = _READS.get(getattr(call.target, "__func__", call.target))
    state = rule.first(call, held) if rule is not None else None
    return (state, state if rule is not None and rule.alike else WHOLE) if state is not None else None

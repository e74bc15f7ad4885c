"""What the code of a stage calls where the ranks of a shard group compute parts of its values (`stagecode.shards`).

A change of state is one module: what the forward does with a tensor, and the backward with its gradient.  These
exchanges stand inside of computes.  All members run the computes of their stages in one order, and autograd runs a
backward in the reverse order of its forward, so all make the same exchanges in the same order, in a group of their own.
Messages are posted and awaited between computes, never inside of one, and the proof of a program lets the members meet
in each of their computes (`passes.program.messages`): so what is proven to end ends with them.
Partial sums are added in the dtype of the product that made them.

Where a device moves bytes while it computes (`Members.beside`), exchanges of a backward run beside products that make
gradients of weights (`weight_gradients.fill`), and a value that was gathered for such products is gathered again in the
backward instead of kept, beside the products that make gradients of it (Korthikanti et al., arXiv 2205.05198, section
4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from autopart.rng import keyed, keyed_rows
from autopart.runtime.activity import waiting
from autopart.runtime.group.world import World
from autopart.runtime.stages.slice_functions import Places, Rows, among_all, own_of
from autopart.runtime.stages.weight_gradients import begin_filling, fill

PURPOSE = "shards"
"""Of the groups of ranks that compute parts of the same values (`World.group`)."""

Cut = tuple[int, int]
"""(axis, before): the axis is (before, shards, the rest), of which a rank has its entry of the middle one."""
Move = Callable[[torch.Tensor], torch.Tensor]
Begun = Callable[[], torch.Tensor]
"""Waits for an exchange that has begun, and returns its result."""


class Members(Protocol):
    """The ranks of a shard group, as one of them sees it.  index: its own place; count: how many there are.  beside:
    whether they compute while they exchange."""

    index: int
    count: int
    beside: bool

    def summed(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """Return the sum, or the largest, of all members' tensors; equal on all to the bit."""

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all members' tensors, stacked in the order of members."""

    def begin_gathering(self, tensor: torch.Tensor) -> Begun:
        """Begin to gather, and return what waits for the result."""

    def scattered(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum of all members' entries for this one; each gives one for every member, stacked in order."""


class ShardGroup:
    """Members that are processes; their group was opened before (`PURPOSE`)."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world, self._ranks = world, tuple(ranks)
        self.index, self.count = self._ranks.index(world.rank), len(self._ranks)
        self._order = [self._ranks.index(rank) for rank in sorted(ranks)]  # as a group counts them
        self._back = [sorted(ranks).index(rank) for rank in self._ranks]
        # Where they overlap, sums of replicas run in the last backward, and take what is complete.
        self.beside = not world.overlaps

    def summed(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """Return the sum, or the largest, of all members' tensors."""
        found = tensor.detach().clone(memory_format=torch.contiguous_format)
        on_host = found.cpu() if self._world.staged else found
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._wait(dist.all_reduce(on_host, op, self._group(), async_op=True))
        return on_host.to(found.device)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all members' tensors, stacked."""
        finish = self.begin_gathering(tensor)
        fill()
        return finish()

    def begin_gathering(self, tensor: torch.Tensor) -> Begun:
        """Begin to gather all members' tensors, stacked, and return what waits for them."""
        own = tensor.detach().contiguous()
        on_host = own.cpu() if self._world.staged else own
        found = torch.empty((self.count, *own.shape), dtype=own.dtype, device=on_host.device)
        parts = [found[place] for place in self._order]
        work = dist.all_gather(parts, on_host, group=self._group(), async_op=True)

        def finished() -> torch.Tensor:
            with waiting():
                work.wait()
            return found.to(own.device)

        return finished

    def scattered(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum of all members' parts for this one.  Gloo sums all and keeps a part, at twice the bytes, so
        there members send each other their parts, and each adds what it gets in the order of members."""
        own = parts.detach()[self._order]
        on_host = own.cpu() if self._world.staged else own
        if on_host.device.type == "cpu":
            found = torch.empty_like(on_host)
            self._wait(dist.all_to_all_single(found, on_host, group=self._group(), async_op=True))
            return found[self._back].sum(0).to(own.device)
        found = torch.empty_like(on_host[0])
        self._wait(dist.reduce_scatter_tensor(found, on_host, group=self._group(), async_op=True))
        return found

    def _group(self) -> dist.ProcessGroup:
        return self._world.group(self._ranks, purpose=PURPOSE)

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for an exchange that has begun, after what is to run beside it."""
        assert work is not None
        fill()
        with waiting():
            work.wait()


# -- moves ------------------------------------------------------------------------------------------------------------


def _keep(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _sum(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    return members.summed(tensor)


def _first(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if members.index == 0 else torch.zeros_like(tensor)


def _parts(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its axis as (before, shards, the rest)."""
    axis, before = cut
    return torch.unflatten(tensor, axis, (before, members.count, -1))


def _slice(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    axis = cut[0]
    return _parts(members, cut, tensor).select(axis + 1, members.index).flatten(axis, axis + 1).contiguous()


def _gather(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    return _joined(cut, members.gathered(tensor))


def _joined(cut: Cut, every: torch.Tensor) -> torch.Tensor:
    """Return the tensor that members have these parts of, stacked; dense, also where each part is one entry."""
    axis, before = cut
    parts = torch.unflatten(every, axis + 1, (before, -1)).movedim(0, axis + 1)
    return parts.flatten(axis, axis + 2).contiguous()


def _scatter(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    axis = cut[0]
    parts = _parts(members, cut, tensor).movedim(axis + 1, 0)
    return members.scattered(parts).flatten(axis, axis + 1)


def _pad(members: Members, cut: Cut, tensor: torch.Tensor) -> torch.Tensor:
    axis, before = cut
    shape = [size * members.count if place == axis else size for place, size in enumerate(tensor.shape)]
    whole = tensor.new_zeros(shape)
    _parts(members, cut, whole).select(axis + 1, members.index).copy_(torch.unflatten(tensor, axis, (before, -1)))
    return whole


MOVES: dict[str, Callable[[Members, Cut, torch.Tensor], torch.Tensor]] = {
    "keep": _keep, "sum": _sum, "first": _first, "slice": _slice, "gather": _gather, "scatter": _scatter, "pad": _pad,
}  # fmt: skip
"""What a rank does with a tensor (`passes.shards.states`), but for a change between two cuts."""


class Gathering:
    """Gathers a value once more in the backward, for all products that read it there (`weight_gradients.Source`)."""

    def __init__(self, members: Members, cut: Cut) -> None:
        self._members, self._cut = members, cut
        self._begun: Begun | None = None

    def begin(self, part: torch.Tensor) -> Begun:
        """Begin to gather, and return what waits for it."""
        if self._begun is None:
            finish = self._members.begin_gathering(part)
            self._begun = cache(lambda: _joined(self._cut, finish()))
        return self._begun

    def end(self) -> None:
        """Forget the value: all its readers have it."""
        self._begun = None


class Exchange(nn.Module):
    """Changes the state of a value, and of its gradient back.

    there, back: moves of the forward and of the backward, as (word, cut); "recut" has two cuts."""

    def __init__(self, members: Members, there: tuple[str, Cut, Cut], back: tuple[str, Cut, Cut]) -> None:
        super().__init__()
        self._change = there
        self._there, self._back = _move(members, *there), _move(members, *back)
        self._members, self._gathers = members, there[1] if there[0] == "gather" else None

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value in its new state."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return self._there(tensor)
        beside = self._members.beside
        again = Gathering(self._members, self._gathers) if beside and self._gathers is not None else None
        found: torch.Tensor = _Exchanged.apply(self._there, self._back, tensor, beside, again)  # type: ignore[no-untyped-call]
        if again is not None and found.is_contiguous():
            base: Any = found if found._base is None else found._base
            base.again = tensor.detach(), again
        return found

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor of the shape of the value in its new state, without an exchange."""
        (word, (axis, _), (other, _)), shape = self._change, list(tensor.shape)
        if word in ("gather", "pad", "recut"):
            shape[axis] *= self._members.count
        if word in ("slice", "scatter", "recut"):
            shape[other if word == "recut" else axis] //= self._members.count
        return torch.empty_like(tensor) if word in ("keep", "first") else tensor.new_empty(shape)


def _move(members: Members, word: str, old: Cut, new: Cut) -> Move:
    if word == "recut":
        return lambda tensor: _slice(members, new, _gather(members, old, tensor))
    return partial(MOVES[word], members, old)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, there: Move, back: Move, tensor: torch.Tensor, beside: bool, again: Gathering | None
    ) -> torch.Tensor:
        ctx.back, ctx.beside, ctx.again = back, beside, again
        found = there(tensor)
        return found.view_as(found) if found is tensor else found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.again is not None:
            ctx.again.end()
        if ctx.beside:
            begin_filling()
        return None, None, ctx.back(grads[0]), None, None


# -- ops that need more than their own part ---------------------------------------------------------------------------


class Drawn(nn.Module):
    """A random op that draws for a whole tensor, of which each member has a part.  cut: of its operand and results,
    None where all have all.  order: of the axes in the memory of the operand in the whole program, since numbers are
    drawn in that order.  places: of a slice of tokens in the whole sequence.  rows: for `rng.keyed_rows`, where
    replicas have some of the rows; None where all have all."""

    def __init__(
        self, members: Members, cut: Cut | None, order: Sequence[int], places: Places = (), rows: Rows | None = None
    ) -> None:
        super().__init__()
        self._members, self._cut, self._order, self._places = members, cut, tuple(order), places
        self._draw = keyed if rows is None else lambda op, number, *given: keyed_rows(op, number, *rows, *given)

    def forward(self, op: Any, number: int, tensor: torch.Tensor, *arguments: Any) -> Any:
        """Return this member's part of what the op returns."""
        places = self._own(tensor)
        return own_of(self._draw(op, number, among_all(tensor, places, self._order), *arguments), places)

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor that lies in memory as a result of this shape does."""
        places = self._own(part)
        found: torch.Tensor = own_of(among_all(part, places, self._order), places)
        return found

    def _own(self, tensor: torch.Tensor) -> Places:
        """Return where this member's part lies in the whole, the last axis first."""
        if self._cut is None:
            return self._places
        (axis, before), members = self._cut, self._members
        found = {place[0]: place for place in self._places}
        if axis in found:  # of the tokens of the slice, each member has some
            _, stride, block, tokens, low, high = found[axis]
            share = (high - low) // members.count
            first = low + members.index * share
            found[axis] = axis, stride, block, tokens, first, first + share
        else:
            rest = tensor.shape[axis] // before
            found[axis] = axis, before, rest, members.count, members.index, members.index + 1
        return tuple(sorted(found.values(), reverse=True))


class Vocabulary(nn.Module):
    """An embedding of which each member has the rows of some words: an addend of it, zeros for words of others."""

    def __init__(self, members: Members, words: int, padding: int = -1) -> None:
        super().__init__()
        self._words, self._own = words, words // members.count
        self._first = members.index * self._own
        self._padding = padding - self._first if 0 <= padding - self._first < self._own else -1

    def forward(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the addend of this member."""
        torch._assert_async(((ids >= 0) & (ids < self._words)).all())
        inside = (ids >= self._first) & (ids < self._first + self._own)
        own = torch.where(inside, ids - self._first, 0)
        found: torch.Tensor = torch.ops.aten.embedding.default(table, own, self._padding)
        return found.masked_fill(~inside.unsqueeze(-1), 0)


class ClassEntropy(nn.Module):
    """The cross entropy of rows whose logits the members divide by classes: three sums forward, none backward.

    mean: over the rows whose target is not `ignore`, else their sum."""

    def __init__(self, members: Members, ignore: int, *, mean: bool) -> None:
        super().__init__()
        self._members, self._ignore, self._mean = members, ignore, mean

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, equal on all members."""
        return _ClassEntropy.apply(self._members, self._ignore, self._mean, logits, target)  # type: ignore[no-any-return, no-untyped-call]


class _ClassEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, members: Members, ignore: int, mean: bool, logits: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = logits.shape[1]
        counted = target != ignore
        torch._assert_async((~counted | ((target >= 0) & (target < own * members.count))).all())
        place = target - members.index * own
        inside = counted & (place >= 0) & (place < own)
        place = torch.where(inside, place, 0)
        shifted = wide - members.summed(wide.amax(1), largest=True).unsqueeze(1)
        exponents = shifted.exp()
        chosen = torch.where(inside, shifted.gather(1, place.unsqueeze(1)).squeeze(1), 0)
        totals, chosen = members.summed(torch.stack((exponents.sum(1), chosen)))
        losses = torch.where(counted, totals.log() - chosen, 0)
        count = counted.sum() if mean else torch.ones((), dtype=torch.long, device=target.device)
        ctx.save_for_backward(exponents.div_(totals.unsqueeze(1)), place, inside, counted, count)
        ctx.dtype = logits.dtype
        return (losses.sum() / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shares, place, inside, counted, count = ctx.saved_tensors
        found = shares.scatter_add(1, place.unsqueeze(1), -inside.to(shares.dtype).unsqueeze(1))
        scale = torch.where(counted, grads[0].to(shares.dtype) / count, 0)
        return None, None, None, (found * scale.unsqueeze(1)).to(ctx.dtype), None


class RowEntropy(nn.Module):
    """The cross entropy of rows that the members divide: an addend of the mean over the rows of all of them."""

    def __init__(self, members: Members, ignore: int, smoothing: float) -> None:
        super().__init__()
        self._members, self._ignore, self._smoothing = members, ignore, smoothing

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the addend of this member."""
        count = self._members.summed((target != self._ignore).sum())
        given = torch.nn.functional.cross_entropy
        total = given(logits, target, None, None, self._ignore, None, "sum", self._smoothing)
        return total / count

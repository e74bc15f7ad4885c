"""A lower bound for each way to divide the devices into positions, with any number of stages a rank.

Take a plan with M micro-batches on G positions, the devices of each of which work together, with k stages each: every
position has one stage in each of k laps (`placed`).  Number the stages 0 <= s < kG, let F, I and B be the forward, the
part of the backward that the stage before waits for, and the whole backward of one micro-batch.  For position g,

    step >= F of all stages before its stage of lap l  +  M (F + B) of its stages  -  M F of those of laps before l
    step >= F of all stages  +  I of all stages behind its last one  +  M B of all its stages
    step >= F + I of all stages

since it has nothing else to do before that micro-batch has come to its stage of lap l, or back to its last one.  The
messages between stages that it has passed by then are added to F and I: all within laps, whose positions are different
(`crossings`), and none from one lap to the next, which may begin where that one ends.  To
each of the first two may be added its optimizer step, and the sums of its gradients less one backward of one stage:
sums follow the last compute of a rank, beside that compute (`play`).

Every one of these is linear in which block stands where.  With prices that are 1 together, the step is at least the
least of their weighted sum over all ways to cut the chain into kG stages, which a dynamic program finds: stage after
stage, each on a position that has none in this lap yet, in any order in each lap.  Unlike replicas have whole rows: in
each stage one of a few parts of a micro-batch holds (`sets`).  Any prices give a bound; the best of a few is taken, and
the least over all ways to divide the devices, or some of them.

Assumed: as in `sets` and `prices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from autopart.passes.graph.cuts import Floats, Ints
from autopart.passes.proof.crossings import paces, parted, sent_bytes
from autopart.passes.proof.prices import Priced
from autopart.passes.proof.sets import Taken, counts_of
from autopart.passes.search.space import gradient_edges

MOST_DIVISIONS = 3000
"""Ways to divide the devices up to which there is a bound."""
AT_ONCE, TRIES = 16, 4000
"""Of them that are looked at together, and how often one is in all."""


@dataclass(frozen=True)
class Prices:
    """Parts of the step by which inequalities count.

    laps: for each lap, and at the end the way back.  path: of F + I of all stages.  sums: part of the sums that counts.
    """

    laps: tuple[float, ...]
    path: float
    sums: float


class Tour:
    """The ways in which positions, so many of each kind, follow one another in a lap.

    A state is how many of each kind have had their stage; a node is a state, the kind of the last one, and one of the
    parts of a micro-batch that it may have.  kind, part: of each node.  before: the place of the state without its
    last one, 0 for the empty one.  starts: the first node of each state but the empty one; the full one is last.  used,
    unused: of each node by kind, the positions before its own, and those behind it.
    """

    def __init__(self, numbers: tuple[int, ...], parts: int) -> None:
        states = sorted(product(*(range(number + 1) for number in numbers)), key=lambda state: (sum(state), state))
        known = {state: place for place, state in enumerate(states)}
        nodes, starts = list[tuple[int, int, int, Taken, list[int]]](), list[int]()
        for state in states[1:]:
            starts.append(len(nodes))
            left = [number - done for number, done in zip(numbers, state, strict=True)]
            for kind, part in product([kind for kind, done in enumerate(state) if done], range(parts)):
                rest = (*state[:kind], state[kind] - 1, *state[kind + 1 :])
                nodes.append((kind, part, known[rest], rest, left))
        kinds, chosen, before, used, unused = zip(*nodes, strict=True)
        self.kind, self.part, self.before, self.starts = map(np.array, (kinds, chosen, before, starts))
        self.used, self.unused = np.array(used, float), np.array(unused, float)


@dataclass(frozen=True)
class Divisions:
    """Ways to divide devices into positions, with as many positions of each kind.

    numbers: positions of each kind.  parts: at most so many parts of a micro-batch of which one keeps a stage busy.
    places: (divisions, kinds), of the set of each kind.
    """

    numbers: tuple[int, ...]
    parts: int
    places: Ints

    @cached_property
    def tour(self) -> Tour:
        """The orders of these positions."""
        return Tour(self.numbers, self.parts)

    def some(self, chosen: Ints) -> Divisions:
        """Return those that are chosen."""
        return replace(self, places=self.places[chosen])


class Factors(NamedTuple):
    """By how much forwards, backwards and the parts of those that do not wait count: by division, price, lap (not of
    backwards) and node; of backwards without sums beside them, and with them."""

    forward: Floats
    backward: tuple[Floats, Floats]
    inputs: Floats


@dataclass(frozen=True)
class Positions:
    """What blocks cost, in nanoseconds.

    parts: by set, places of the parts of a micro-batch for one of which the devices of a stage are busy, -1 for no
    other.  forward, backward: of a micro-batch, as (parts, blocks).  inputs: the part that blocks before wait for.
    optimizer, sums: once a step, as (sets, blocks).  sent: bytes of a message to a stage that begins with a block, and
    of their gradients.  paces: latency and nanoseconds per byte between two sets.  in_line, comes_back: whether each
    stage waits for the one before it in the forward, and for the one behind it in the backward.
    """

    micros: int
    parts: Ints
    forward: Floats
    backward: Floats
    inputs: Floats
    optimizer: Floats
    sums: Floats
    sent: tuple[Floats, Floats]
    paces: tuple[Floats, Floats]
    in_line: bool
    comes_back: bool

    @classmethod
    def of(cls, case: Priced) -> Positions:
        """O(sets * blocks)."""
        parts, forward, backward, inputs = case.parts_ns
        space = case.space
        learning = [op.name in space.learning for op in space.chain.blocks.ops]
        first = learning.index(True) if True in learning else len(learning)
        waits = gradient_edges(space)
        back = space.is_chain and all(waits[b - 1, b] for b in range(first + 1, space.chain.n))
        learns = np.where(np.arange(space.chain.n) >= first, 1.0, 0.0)
        inputs = (inputs if case.orders else backward) * learns
        micros = len(case.micro_rows)
        away, gradients = sent_bytes(space, max(case.micro_rows)) if space.is_chain else (0 * learns, 0 * learns)
        sent = away, gradients * (np.arange(space.chain.n) > first)
        ends, links = case.ends_ns, paces(space, case.sets or ())
        return cls(micros, parts, forward, backward * learns, inputs, *ends, sent, links, space.is_chain, back)

    @cached_property
    def least(self) -> tuple[Floats, Floats, Floats]:
        """Of each set and block forward, backward, and the part of it that does not wait, at least."""
        forward, backward, inputs = (
            each[self.parts].min(axis=1) for each in (self.forward, self.backward, self.inputs)
        )
        return forward, backward, inputs

    @cached_property
    def whole(self) -> tuple[Floats, Floats]:
        """Of each set all blocks: all micro-batches with the optimizer, and the path of one."""
        once = self.optimizer.sum(axis=1)
        busy = self.micros * (self.forward + self.backward).sum(axis=1)[self.parts].min(axis=1) + once
        return np.maximum(1.0, busy), (self.forward + self.inputs).sum(axis=1)[self.parts].min(axis=1)

    def least_work(self, some: Divisions) -> Floats:
        """Return a quick bound for divisions, of the work and of the path: every block where it is best."""
        forward, backward, inputs = self.least
        weights = 1 / self.whole[0][some.places]
        weights /= (weights * some.numbers).sum(axis=1, keepdims=True)
        busy = weights[:, :, None] * (self.micros * (forward + backward) + self.optimizer)[some.places]
        through = (forward + inputs)[some.places]
        bounds = [each.min(axis=1).sum(axis=1) for each in ((busy, through) if self.comes_back else (busy,))]
        return np.asarray(np.max(bounds, axis=0))

    def weights(self, some: Divisions, prices: Sequence[Prices]) -> tuple[Floats, Floats]:
        """Return the weights of positions for which no division of a model of one kind of block is better than
        another, and its step: (divisions, prices, kinds of positions) and (divisions, prices)."""
        path = np.array([p.path for p in prices])[:, None]
        sums = np.array([p.sums for p in prices])
        busy = self.whole[0] + sums[:, None] * self.sums.sum(axis=1)  # (prices, sets)
        own = np.moveaxis(busy[:, some.places], 0, 1) / np.array(some.numbers)
        through = self.whole[1][some.places][:, None, :]
        low, high = np.zeros(own.shape[:2]), 2 * (own * some.numbers).max(axis=2) + through.max(axis=2)
        for _ in range(40):
            step = (low + high) / 2
            more = (np.maximum(0, step[:, :, None] - path * through) / own).sum(axis=2) < 1 - path[:, 0]
            low, high = np.where(more, step, low), np.where(more, high, step)
        found = np.maximum(0, high[:, :, None] - path * through) / own
        found *= (1 - path) / np.maximum(1e-300, found.sum(axis=2, keepdims=True))
        return found / np.array(some.numbers), high

    def bounds(self, some: Divisions, per_rank: int, prices: Sequence[Prices]) -> Floats:
        """Return the bound of each division with so many stages a rank, in nanoseconds.

        O(divisions * prices * laps * nodes * blocks).
        """
        weights, steps = self.weights(some, prices)
        factors, tour = self._factors(some.tour, weights, prices), some.tour
        sums = np.array([p.sums for p in prices])
        all_forward, all_backward = (each.sum(axis=1) for each in self.least[:2])
        share = all_backward / np.maximum(1.0, all_forward + all_backward)
        # The price for the one stage of a position whose backward hides sums.
        fee = sums[:, None] * weights * steps[:, :, None] * share[some.places][:, None, :] / (self.micros * per_rank)
        own, start = weights[:, :, tour.kind], fee[:, :, tour.kind][:, :, None]
        # With all sums, and with those that one backward hides: two arrays, as a last axis of two is slow.
        exposed, hiding = np.full(factors.forward.shape, np.inf), np.full(factors.forward.shape, np.inf)
        before = np.full((*exposed.shape[:3], len(tour.starts) + 1), np.inf)
        before[:, :, 0, 0] = 0.0
        at = some.places[:, tour.kind]
        part = self.parts[at, np.minimum(tour.part, self.parts.shape[1] - 1)]
        leave, enter = self._messages(some, weights, prices)
        n = self.forward.shape[1]
        for b in range(n):
            came = before[..., tour.before]
            came += enter[b]
            np.minimum(exposed, came, out=exposed)
            np.minimum(hiding, np.add(came, start, out=came), out=hiding)
            forward, backward, inputs = (x[part, b][:, None] for x in (self.forward, self.backward, self.inputs))
            ends = own * (self.optimizer[at, b][:, None] + sums[:, None] * self.sums[at, b][:, None])
            way = factors.forward * forward[:, :, None] + factors.inputs * inputs[:, :, None]
            for value, factor in ((exposed, factors.backward[0]), (hiding, factors.backward[1])):
                value += way
                value += (factor * backward + ends)[:, :, None]
            np.minimum(exposed, hiding, out=came)
            if b + 1 < n:
                came += leave[b + 1]
            best = np.minimum.reduceat(came, tour.starts, axis=3)
            before[..., 1:] = best
            before[:, :, 1:, 0], before[:, :, 0, 0] = best[:, :, :-1, -1], np.inf
        found = best[:, :, -1, -1] - (fee * some.numbers).sum(axis=2)
        few = np.sort(self.least[0] + self.least[1], axis=1)[:, :per_rank].sum(axis=1)
        return np.asarray(np.maximum(found.max(axis=1), self.micros * few[some.places].max(axis=1)))

    def _factors(self, tour: Tour, weights: Floats, prices: Sequence[Prices]) -> Factors:
        laps, path, later = _laps(prices)
        own, unused, used = weights[:, :, tour.kind], weights @ tour.unused.T, weights @ tour.used.T
        waiting = (later * (1 - path)[:, None])[:, :, None] + laps[:, :-1, None] * unused[:, :, None]
        forward = self.micros * own[:, :, None] * (1 - later)[:, :, None] + path[:, None, None]
        forward += waiting if self.in_line else 0.0
        inputs = np.broadcast_to(path[:, None, None], waiting.shape).copy()
        inputs[:, :, -1] += laps[:, -1:] * used
        hidden = np.array([p.sums for p in prices])[:, None]
        return Factors(forward, (own * self.micros, own * (self.micros - hidden)), inputs)

    def _messages(
        self, some: Divisions, weights: Floats, prices: Sequence[Prices]
    ) -> tuple[list[Floats], list[Floats]]:
        """Return by block, for each node, its part of the messages to the stage behind it if that begins with the
        block, and of those from the stage before it: nothing where one lap ends and the next one begins."""
        tour, numbers = some.tour, some.numbers
        latency, pace = (
            parted(each[some.places[:, :, None], some.places[:, None, :]], numbers)[:, tour.kind] for each in self.paces
        )
        laps, path, later = _laps(prices)
        own, unused, used = weights[:, :, tour.kind], weights @ tour.unused.T, weights @ tour.used.T
        first, last = tour.before == 0, tour.unused.sum(axis=1) == 0
        common = path[:, None] + later * (1 - path)[:, None]
        found: tuple[list[Floats], list[Floats]] = [], []
        for each, behind, done, none in ((found[0], unused, used + own, last), (found[1], unused + own, used, first)):
            away = common[:, :, None] + laps[:, :-1, None] * behind[:, :, None]
            back = np.broadcast_to(path[:, None, None], away.shape).copy()
            back[:, :, -1] += laps[:, -1:] * done
            away[..., none] = back[..., none] = 0.0
            known: dict[tuple[float, float], Floats] = {}
            for sizes in zip(*self.sent, strict=True):
                if sizes not in known:
                    taken = [(latency + pace * size if size else 0 * pace)[:, None, None] for size in sizes]
                    known[sizes] = away * taken[0] + back * taken[1]
                each.append(known[sizes])
        return found

    def grids(self, per_rank: int) -> list[list[Prices]]:
        """Return prices to try, those first that are best most often: the later ones are for few divisions."""
        ends, most = [0.0] * (per_rank - 1), (0.0, 0.5, 1.0)
        head, even = (1.0, *ends, 0.0), (*[1 / per_rank] * per_rank, 0.0)
        if not self.comes_back:
            return [[Prices(head, 0.0, 0.0), Prices(head, 0.0, 1.0)], [Prices(head, 0.0, 0.5)]]
        every = tuple([1 / (per_rank + 1)] * (per_rank + 1))
        back = (*[0.0] * per_rank, 1.0)
        found = [Prices(laps, 0.0, sums) for laps in dict.fromkeys((head, even, every, back)) for sums in most]
        found += [Prices(every, path, sums) for path in (0.25, 0.5, 0.75) for sums in (0.0, 1.0)]
        first = [Prices(head, 0.0, 0.0), Prices(every, 0.25, 0.0)]
        rest = [prices for prices in found if prices not in first]
        return [first, [each for each in rest if not each.sums], [each for each in rest if each.sums]]


def _laps(prices: Sequence[Prices]) -> tuple[Floats, Floats, Floats]:
    """Return by price what laps count, and the way back; the path; and all that comes behind each lap."""
    laps = np.array([p.laps for p in prices])
    return laps, np.array([p.path for p in prices]), laps[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]


def divisions(counts: Taken, sets: Sequence[Taken], least: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide devices, or some of them, into at least so many positions, as places of sets."""

    def more(left: Taken, start: int, taken: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(taken) >= least:
            yield taken
        for place in range(start, len(sets)):
            rest = tuple([a - b for a, b in zip(left, sets[place], strict=True)])
            if min(rest) >= 0:
                yield from more(rest, place, (*taken, place))

    yield from more(counts, 0, ())


def positions_bound(case: Priced, per_rank: Sequence[int], enough: float) -> int:
    """Return the bound of plans with these numbers of stages a rank, in nanoseconds; 0 for too many divisions.

    enough: a larger bound is of no use.
    """
    request = case.space.request
    if not case.sets or request.policy != "split" or not request.synchronous or not case.space.costs.overlap:
        return 0
    costs = Positions.of(case)
    least: float = enough
    many = (costs.parts >= 0).sum(axis=1).tolist()
    alike: dict[tuple[tuple[int, ...], int], list[list[int]]] = {}
    for found, division in enumerate(divisions(counts_of(case.space), case.sets, 1 + (min(per_rank) > 1))):
        if found >= MOST_DIVISIONS:
            return 0
        kinds = sorted(Counter(division).items(), key=lambda item: (-item[1], item[0]))
        key = tuple([number for _, number in kinds]), max(many[place] for place, _ in kinds)
        alike.setdefault(key, []).append([place for place, _ in kinds])
    every = [Divisions(numbers, parts, np.array(places)) for (numbers, parts), places in alike.items()]
    quick = [costs.least_work(each) for each in every]
    left = TRIES
    for at in sorted(range(len(every)), key=lambda at: float(quick[at].min())):
        for number in sorted(per_rank, reverse=True):
            if number * sum(every[at].numbers) <= case.space.chain.n:
                value, left = _least(costs, every[at], quick[at], number, least, left)
                least = min(least, value)
    return max(0, int(least * (1 - 1e-9)) - 2) if least < float("inf") else 0


def _least(
    costs: Positions, every: Divisions, quick: Floats, per_rank: int, enough: float, tries: int
) -> tuple[float, int]:
    """Return the least bound of these divisions, or one that is more than enough, and the tries that are left.

    The divisions with the least bounds get better ones, until none of those is among them.
    """
    values, known = quick.copy(), np.zeros(len(quick), dtype=int)
    levels = costs.grids(per_rank)
    while tries > 0:
        low = np.argsort(values, kind="stable")[:AT_ONCE]
        low = low[values[low] < enough]
        least = known[low[0]] if len(low) else len(levels)
        if least == len(levels):
            break
        chosen = low[known[low] == least]
        values[chosen] = np.maximum(values[chosen], costs.bounds(every.some(chosen), per_rank, levels[least]))
        known[chosen] += 1
        tries -= len(chosen)
    return float(values.min()), tries

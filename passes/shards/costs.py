"""What tensor parallelism costs: the graph of one rank of a shard group at any size, the cluster of such groups, and a
plan for groups spelled out for ranks.

The planner sees a group as one device that runs the graph of one of its ranks.  Of an op that takes T for the whole:

    time      max(T / t, one launch) where it is cut, T where it is not; a product T / t * w(part) / w(whole), with
              w = ceil(tiles / units) * units / tiles, the share of the device that its last wave leaves idle
              (NVIDIA, "Matrix Multiplication Background User's Guide", wave quantization), and at least a pass over a
              weight that is whole.  tiles: ceil(m / 128) ceil(n / 128) of a result of m x n
    exchange  latency + passes * (t - 1) / t * bytes of the whole value / link of the innermost level, for the op that
              first reads a value in another state
    memory    1 / t of what a cut op saves, but all of what was gathered for it
    once      gradients of parameters that are whole are summed over the group once a step, at the rate of that link
              (`Param.once_ns`; their latencies are left out)

Where devices move bytes while they compute, as the code of a rank does (`runtime.stages.shard_group`):

    beside    an exchange of a backward counts as far as it takes longer than the products of weights' gradients that
              run meanwhile; where these wait for W, it counts whole (`Cost.hidden_ns`).  What a product
              works on stays until it runs, so its workspace counts twice
    again     what was gathered for products with trained weights alone is not kept: it is gathered again in the
              backward, as far as that takes longer than the products that make gradients of it

Assumed: nothing else uses the link meanwhile; exchanges of a forward, and those that are repeated in recomputation, do
not overlap with computes; products and exchanges that run side by side do not slow each other down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import DEVICE_KINDS, Cluster
from autopart.ir.decision import Decision
from autopart.ir.errors import RefusedError, UsageError
from autopart.ir.graph import Cost, Graph, Op, Size, Value
from autopart.passes.ops.analytic_costs import saved_values
from autopart.passes.ops.cost_model import FIELDS, CostTable, OpCosts
from autopart.passes.ops.row import MATMUL
from autopart.passes.ops.storage import storage
from autopart.passes.ops.table import row_of
from autopart.passes.ops.weight_parts import summed_bytes, weight_parts
from autopart.passes.shards.assignment import Assignment, local_graph
from autopart.passes.shards.calls import Call, calls_of
from autopart.passes.shards.states import CUT_KIND, GATHER, State, passes, transition
from autopart.passes.shards.strategies import NO_DIGIT

TILE = 128
"""Rows and columns of a tile of a product."""
_FWD, _BWD, _SAVED, _SCRATCH, _WEIGHT_NS, _WEIGHT_BYTES, _HIDDEN = (
    FIELDS.index(name)
    for name in ("fwd_ns", "bwd_ns", "saved_bytes", "scratch_bytes", "weight_ns", "weight_bytes", "hidden_ns")
)
_Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupCosts:
    """The costs of one rank of a group at any size (`OpCosts`).

    whole: the costs of a rank that computes everything, on the devices of `cluster`.  graph_of_all: the graph at its
    own size.
    """

    whole: OpCosts
    graph_of_all: Graph
    assignment: Assignment
    cluster: Cluster

    def graph(self, size: Size, device_type: int) -> Graph:
        """See `GraphCosts`; shapes and arguments are not changed.  O(ops + values)."""
        table, local = self.table(size, device_type), self._local
        costs, sizes = table.columns.astype(np.int64).T.tolist(), table.value_bytes
        ops = [replace(op, cost=Cost(*cost)) for op, cost in zip(local.ops, costs, strict=True)]
        values = [Value(v.name, v.shape, v.dtype, sizes[v.name], v.grad, v.rows_axis) for v in local.values]
        return replace(local, size=size, ops=tuple(ops), values=tuple(values))

    def table(self, size: Size, device_type: int) -> CostTable:
        """See `CostModel.table`.  O(values), and O(reads) in numpy."""
        table, t = self.whole.table(size, device_type), self.assignment.shards
        sizes = self._sizes(table.value_bytes)
        columns = np.where(self._cut, table.columns // t, table.columns)
        for row in (_FWD, _BWD):
            launch_ns = np.minimum(table.columns[row], DEVICE_KINDS[self.cluster.kind].launch_ns)
            columns[row] = np.where(self._cut, np.maximum(columns[row], launch_ns), columns[row])
        self._widths(columns, sizes, device_type)
        self._exchanges(columns, sizes)
        op, tensor, again = self._gathered
        for row in (_SAVED, _SCRATCH, _WEIGHT_BYTES):
            more = np.where(table.columns[row][op] > 0, sizes[tensor] * (t - 1) / t, 0)
            np.add.at(columns[row], op, np.where(again & (row == _SAVED), 0, more))
        if self._may_overlap:
            columns[_SCRATCH, list(self._waiting)] *= 2
        states = self.assignment.states
        local = {n: size // t if states[n].kind == CUT_KIND else size for n, size in table.value_bytes.items()}
        return CostTable(np.floor(columns), local)

    def _exchanges(self, columns: npt.NDArray[np.float64], sizes: _Table) -> None:
        """Add the time of exchanges, but for what runs beside others."""
        link, t = self.cluster.levels[0].link, self.assignment.shards
        op, tensor, there, back = self._edges

        def taken_ns(times: _Table) -> npt.NDArray[np.float64]:
            moved = times * sizes[tensor] * (t - 1) / t
            return np.where(times > 0, link.latency_ns + moved * 1e9 / link.bytes_per_s, 0)

        def at_once(pairs: _Table, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            found = np.zeros(len(op))
            np.add.at(found, pairs[0], rows[pairs[1]])
            return found

        forward, backward, inputs = taken_ns(there), taken_ns(back), columns[_BWD] - columns[_WEIGHT_NS]
        hidden, again = np.zeros(len(op)), np.zeros(len(op))
        if self._may_overlap:
            hidden = np.minimum(backward, at_once(self._filled, columns[_WEIGHT_NS]))
            readers = at_once(self._readers, inputs)
            again = np.where(np.isin(np.arange(len(op)), self._readers[0]), np.maximum(forward - readers, 0), 0)
        np.add.at(columns[_FWD], op, forward)
        np.add.at(columns[_BWD], op, backward - hidden + again)
        np.add.at(columns[_HIDDEN], op, hidden)

    def exchange_ns(self) -> dict[str, tuple[int, int]]:
        """Return, by op, the latencies of the exchanges in its forward and in its backward.  O(reads)."""
        found, latency_ns = dict[str, tuple[int, int]](), round(self.cluster.levels[0].link.latency_ns)
        for n, _, there, back in self._edges.T.tolist():
            name = self.graph_of_all.ops[n].name
            fwd_ns, bwd_ns = found.get(name, (0, 0))
            found[name] = fwd_ns + latency_ns * (there > 0), bwd_ns + latency_ns * (back > 0)
        return found

    def _widths(self, columns: npt.NDArray[np.float64], sizes: _Table, device_type: int) -> None:
        """Let products take as much longer as their parts fill fewer waves, and as long as to read a whole weight."""
        units, t = DEVICE_KINDS[self.cluster.kind].units, self.assignment.shards
        device = list(self.cluster.types)[device_type]
        op, tensor, item, n, k, parts, weight_bytes = self._products
        m = sizes[tensor] // (item * n)
        for row, pairs in ((_FWD, ((0, 1),)), (_BWD, ((0, 2), (2, 1)))):
            whole, part = np.stack([m, n, k]), np.stack([m, n, k]) // np.where(parts, t, 1)
            if units:
                longer = _waves(part, pairs, units) / _waves(whole, pairs, units)
                columns[row, op] *= longer
                if row == _BWD:
                    columns[_WEIGHT_NS, op] *= longer
            read_ns = weight_bytes * 1e9 / device.reached_bytes_per_s
            columns[row, op] = np.where(columns[row, op] > 0, np.maximum(columns[row, op], read_ns), 0)

    # ---- what does not depend on the size --------------------------------------------------------------------------

    @cached_property
    def _local(self) -> Graph:
        """The graph of a rank at the size of `graph_of_all`, with what sums of gradients over the group take."""
        graph, link = local_graph(self.graph_of_all, self.assignment), self.cluster.levels[0].link
        per_byte = 2 * (self.assignment.shards - 1) / self.assignment.shards * 1e9 / link.bytes_per_s
        whole = {p.name for p in graph.params if p.trainable and self.assignment.states[p.name].kind != CUT_KIND}
        summed = [replace(p, once_ns=int(summed_bytes(p) * per_byte)) if p.name in whole else p for p in graph.params]
        return replace(graph, params=tuple(summed))

    def _sizes(self, value_bytes: Mapping[str, int]) -> _Table:
        params = [p.size_bytes for p in self.graph_of_all.params]
        return np.array([*[value_bytes[v.name] for v in self.graph_of_all.values], *params], dtype=np.int64)

    @cached_property
    def _place(self) -> dict[str, int]:
        """The place of each value and parameter in `_sizes`."""
        return {name: n for n, name in enumerate(self._names)}

    @cached_property
    def _names(self) -> list[str]:
        graph = self.graph_of_all
        return [*[value.name for value in graph.values], *[param.name for param in graph.params]]

    @cached_property
    def _cut(self) -> npt.NDArray[np.bool_]:
        """Whether each op is cut."""
        return np.array([self.assignment.strategies[op.name].digit != NO_DIGIT for op in self.graph_of_all.ops])

    @cached_property
    def _calls(self) -> list[Call]:
        return calls_of(self.graph_of_all)

    @cached_property
    def _edges(self) -> _Table:
        """Exchanges, one a column: (op, tensor, how often its bytes pass a link in the forward, in the backward).  A
        value that several ops read in one state passes once, at the first of them."""
        values, params = self.graph_of_all.value_map(), self.graph_of_all.param_map()
        seen: set[tuple[str, State]] = set()
        found = [(0, 0, 0, 0)]
        for n, call in enumerate(self._calls):
            for name, held, wanted in self.assignment.reads(call.op, call):
                if held == wanted or (name, wanted) in seen:
                    continue
                seen.add((name, wanted))
                there, back = passes(held, wanted)
                back = back if (values[name].grad if name in values else params[name].trainable) else 0
                if there or back:
                    found.append((n, self._place[name], there, back))
        return np.array(found, dtype=np.int64).T

    @cached_property
    def _may_overlap(self) -> bool:
        return DEVICE_KINDS[self.cluster.kind].beside

    @cached_property
    def _waiting(self) -> dict[int, str]:
        """The ops whose products of weights' gradients can wait, each with its weight."""
        parts = weight_parts(self.graph_of_all, storage(self.graph_of_all))
        return {n: part.weight for n, part in enumerate(parts) if part.halves}

    @cached_property
    def _filled(self) -> _Table:
        """(exchange, op) of the products that run beside each exchange of a backward, one a column, as in
        `runtime.stages.weight_gradients.fill`: all that wait but the largest, or the only one."""
        params, edges = self.graph_of_all.param_map(), defaultdict[int, list[int]](list)
        for number, (op, _, _, back) in enumerate(self._edges.T.tolist()):
            edges[op] += [number] * bool(back)
        waiting, found = list[tuple[int, int]](), list[tuple[int, int]]()
        for n in reversed(range(len(self.graph_of_all.ops))):
            if n in self._waiting:
                param = params[self._waiting[n]]
                waiting.append((prod(self.assignment.local_shape(param.name, param.shape)), n))
            for number in edges.get(n, ()):
                kept = [max(waiting, key=lambda each: each[0])] if len(waiting) > 1 else []
                found += [(number, op) for size, op in waiting if (size, op) not in kept]
                waiting = kept
        return np.array(found, dtype=np.int64).reshape(-1, 2).T

    @cached_property
    def _saved(self) -> list[tuple[int, str]]:
        """(op, value) of what each op saves for its backward and reads whole."""
        values, params = self.graph_of_all.value_map(), self.graph_of_all.param_map()
        found = []
        for n, call in enumerate(self._calls):
            saved = set(saved_values(call.op, values, params))
            for name, _, wanted in self.assignment.reads(call.op, call) if saved else ():
                if name in saved and wanted.kind != CUT_KIND:
                    found.append((n, name))
        return found

    @cached_property
    def _readers(self) -> _Table:
        """(exchange, op) of the products for which a value is gathered again in the backward, one a column."""
        roots, readers = storage(self.graph_of_all), defaultdict[str, list[int]](list)
        for n, name in self._saved:
            readers[roots.get(name, name)].append(n)
        found = []
        for number, (op, place, there, _) in enumerate(self._edges.T.tolist()):
            name, call = self._names[place], self._calls[op]
            reads = [(held, wanted) for read, held, wanted in self.assignment.reads(call.op, call) if read == name]
            moves = {transition(held, wanted).forward for held, wanted in reads}
            own = readers.get(roots.get(name, name), [])
            if there and moves == {GATHER} and own and all(n in self._waiting for n in own):
                found += [(number, n) for n in own]
        return np.array(found, dtype=np.int64).reshape(-1, 2).T

    @cached_property
    def _gathered(self) -> tuple[_Table, ...]:
        """(op, tensor, whether it is gathered again) of each value of which a cut op is the first to save all, one a
        column."""
        again = set(self._readers[1].tolist()) if self._may_overlap else set()
        first = {name: n for n, name in reversed(self._saved)}
        found = [(n, self._place[name], n in again) for name, n in first.items() if self._cut[n]]
        op, tensor, twice = np.array(sorted(found), dtype=np.int64).reshape(-1, 3).T
        return op, tensor, twice.astype(bool)

    @cached_property
    def _products(self) -> tuple[_Table, ...]:
        """Products with a weight that are cut: (op, result, bytes of an entry, n, k; whether m, n and k are cut; bytes
        of a weight that is whole), of a result of m x n that sums over k."""
        found = [each for n, call in enumerate(self._calls) if self._cut[n] for each in self._product(n, call.op)]
        rows = np.array(found or np.zeros((0, 9)), dtype=np.int64).T
        return *rows[:5], rows[5:8], rows[8]

    def _product(self, place: int, op: Op) -> Iterator[tuple[int, ...]]:
        params, state = self.graph_of_all.param_map(), self.assignment.states
        weights = [params[name] for name in op.params if len(params[name].shape) == 2]
        if row_of(op.target).family != MATMUL or len(weights) != 1 or len(op.writes) != 1:
            return
        (weight,), result = weights, self.graph_of_all.values[self._place[op.writes[0]]]
        n, own = result.shape[-1], state[weight.name]
        k = prod(weight.shape) // max(1, n)
        along_n = state[result.name].kind == CUT_KIND and state[result.name].axis == len(result.shape) - 1
        held = own.kind == CUT_KIND
        along_m = state[result.name].kind == CUT_KIND and not along_n
        item = result.size_bytes // max(1, prod(result.shape))
        whole = 0 if held else weight.size_bytes
        yield place, self._place[result.name], item, n, k, along_m, along_n, held and not along_n, whole


def _waves(sizes: _Table, pairs: Sequence[tuple[int, int]], units: int) -> npt.NDArray[np.float64]:
    """Return how much longer products take than if their last waves were full.  pairs: which of the sizes are the rows
    and columns of each result."""
    found = np.zeros(sizes.shape[1])
    for rows, columns in pairs:
        tiles = -(-sizes[rows] // TILE) * -(-sizes[columns] // TILE)
        found += -(-tiles // units) * units / np.maximum(1, tiles)
    return found


def group_sizes(cluster: Cluster) -> list[int]:
    """Return the numbers of ranks, next to each other and alike, that groups may have inside of the innermost level."""
    inner = cluster.levels[0]
    common = gcd(cluster.world, *(inner.groups or (inner.size,)))

    def alike(count: int) -> bool:
        firsts = range(0, cluster.world, count)
        return all(len(set(cluster.devices[first : first + count])) == 1 for first in firsts)

    return [count for count in range(1, common + 1) if not common % count and alike(count)]


def grouped(cluster: Cluster, shards: int) -> Cluster:
    """Return the cluster of groups of ranks, each as one of its devices.  Raises UsageError where groups do not lie
    inside the innermost level, or would join unlike devices."""
    inner = cluster.levels[0].size
    if shards not in group_sizes(cluster):
        raise UsageError(
            f"tensor_parallel is {shards}, and the innermost level of the cluster has {inner} of {cluster.world} ranks",
            why="each group of ranks that compute together lies inside of it, next to each other, on like devices",
            fix="use a number that divides both",
        )
    levels = [
        replace(
            level,
            size=level.size // shards,
            groups=tuple([size // shards for size in level.groups]),
            # all ranks of a group send their parts at once, at the inner level each through a port of its own
            link=replace(level.link, bytes_per_s=max(1, level.link.bytes_per_s // shards)) if number else level.link,
        )
        for number, level in enumerate(cluster.levels)
    ]
    kept = tuple(level for level in levels if level.size > 1) or (levels[-1],)
    return replace(cluster, devices=cluster.devices[::shards], levels=kept)


def of_groups(decision: Decision) -> Decision:
    """Return the decision for groups of one for their ranks (`spelled_out`).  Raises RefusedError where ranks that
    compute together are not next to each other."""
    shards = decision.shards
    stages = [
        replace(stage, ranks=tuple([r // shards for r in stage.ranks[::shards]]), shards=1) for stage in decision.stages
    ]
    found = replace(decision, world=decision.world // shards, stages=tuple(stages))
    if spelled_out(found, shards) != decision:
        raise RefusedError(
            "this plan cannot be simulated: ranks that compute together are not next to each other, in order",
            fix=f"give each stage ranks n * {shards} to n * {shards} + {shards - 1}",
        )
    return found


def spelled_out(decision: Decision, shards: int) -> Decision:
    """Return the decision for ranks of one that was made for groups."""
    stages = [
        replace(stage, ranks=tuple(r * shards + n for r in stage.ranks for n in range(shards)), shards=shards)
        for stage in decision.stages
    ]
    return replace(decision, world=decision.world * shards, stages=tuple(stages))

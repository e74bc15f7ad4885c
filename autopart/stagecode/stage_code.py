"""The code of a rank's stages for one kind of batch, and the shapes of all values, by number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from autopart.batch.batch import Batch
from autopart.capture import CaptureCache, Captured
from autopart.ir.actions import ACTIONS
from autopart.ir.errors import RefusedError
from autopart.ir.graph import Graph, Size
from autopart.ir.plan import Decision
from autopart.ir.program import Edge
from autopart.ir.shares import RowLayout, parts
from autopart.passes.program.orders import Shape
from autopart.passes.program.routing import edges
from autopart.passes.program.schedules import find, pattern
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.choice import Held
from autopart.passes.tokens.recipe import Recipe
from autopart.planning.derive.reduction import BatchRule, Layouts
from autopart.planning.derive.sliced_shards import choice_for
from autopart.planning.derive.token_axis import token_recipe
from autopart.runtime.stages.shard_group import Members
from autopart.runtime.stages.stage_module import StageModule, StageSlices
from autopart.runtime.tensors import LocalTensors
from autopart.stagecode.compilers import COMPILERS, EAGER, Compiler
from autopart.stagecode.memory import Orders, lay_operands
from autopart.stagecode.shards import held_layouts, held_shape, shard_code
from autopart.stagecode.slicing import SliceChecks
from autopart.stagecode.split import leaving, stage_module, wait_for
from autopart.stagecode.token_slices import slice_stage


class StageCode:
    """The code of a rank's stages.  Engine and stage runners are given the dictionaries once, which are filled later.

    modules: code by stage and rows.  specs: all values as meta tensors, by rows and by (rows, slice).  layouts: how
    values hold the rows that replicas divide, by value or (value, slice).  orders: how values lie in memory, the same
    on all ranks, known before code is made.  prologue: ops that every stage runs for itself on whole sequences, known
    once code was made.  checks: of slices, before every step.
    """

    def __init__(
        self,
        captures: CaptureCache,
        decision: Decision,
        tensors: LocalTensors,
        device: torch.device,
        awaited: Collection[str],
        rewrites: Mapping[int, Sequence[Callable[[StageModule], None]]],
        *,
        backend: str = EAGER,
        members: Mapping[int, Members] = MappingProxyType({}),
        held: Held = (),
    ) -> None:
        """awaited: parameters whose values may be under way when the code begins.  rewrites: by stage, what
        lets the code of its ranks compute together.  backend: what code for the usual number of rows runs on.
        members: by stage, the ranks that compute parts of the same rows.  held: the parameters that they divide."""
        self._members, self._held = members, held
        self._captures, self._decision, self._tensors, self._device = captures, decision, tensors, device
        self._awaited, self.rewrites, self._backend = awaited, rewrites, backend
        self._split = split_stages(decision)
        self._compiler: Compiler | None = None
        self.checks = SliceChecks(tensors, device)
        self.modules: dict[int, dict[int, StageSlices]] = defaultdict(dict)
        self.specs: dict[int | tuple[int, int], Mapping[str, torch.Tensor]] = {}
        self.layouts: dict[str | tuple[str, int], RowLayout] = {}
        self.orders: dict[str, tuple[int, ...]] = {}
        self.prologue: frozenset[str] = frozenset()

    def has(self, rows: int, stages: Collection[int]) -> bool:
        """Return whether shapes, and the code of these stages, are made for micro-batches of this number of rows."""
        return rows in self.specs and all(rows in self.modules[s] for s in stages)

    def prologue_of(self, batch: Batch) -> frozenset[str]:
        """Return the prologue for a batch before code is made; empty if sequences are whole.  Raises RefusedError."""
        recipe = self._recipe(batch, max(self._decision.micro_rows))
        return recipe.prologue if recipe is not None else frozenset()

    def _recipe(self, batch: Batch, rows: int) -> Recipe | None:
        """Return how sequences are cut into slices, None if they are whole.  Raises RefusedError."""
        if not self._decision.token_slices:
            return None
        recipe = token_recipe(self._captures, batch, Size(rows))
        if isinstance(recipe, RefusedError):
            raise recipe
        return recipe

    def add(self, captured: Captured, batch: Batch, stages: Sequence[int], rule: BatchRule) -> None:
        """Make the code of these stages for the rows of `captured`, and hold the tensors that it uses.

        Raises RefusedError where the model cannot be cut into slices, UsageError for sequences of another length, and
        RefusedError as `draws_of`.
        """
        graph = captured.graph
        recipe = self._recipe(batch, graph.rows)
        divided = self._assignment(graph, recipe)
        lay_operands(captured, self.orders)
        self.specs[graph.rows] = specs_of(graph, divided, self.orders)
        self.checks.note_copies(captured)
        self.layouts.update(held_layouts(graph, divided, rule.layouts))
        if recipe is not None:
            self.prologue = recipe.prologue
            self.checks.add(captured, recipe, masks=0 in stages)
            lengths = self._decision.token_slices
            self.layouts.update(held_layouts(graph, divided, sliced_layouts(graph, recipe, lengths, rule.layouts)))
            for number, part in enumerate(recipe.slices(lengths)):
                values = [replace(v, shape=recipe.form(v.name).shape(v.shape, part)) for v in graph.values]
                self.specs[graph.rows, number] = specs_of(replace(graph, values=tuple(values)), divided, self.orders)
        links = edges(self._decision, graph, self.prologue) if stages else ()
        for stage in stages:
            shard = None
            if divided is not None:
                shard = partial(
                    shard_code, graph=graph, assignment=divided, members=self._members[stage], recipe=recipe
                )
            prologue, slices = self._made(captured, recipe, links, stage, rule, shard)
            self.modules[stage][graph.rows] = prologue, slices
            for code in slices if prologue is None else (*slices, prologue):
                self._tensors.hold(code.held, captured.tensors)
                wait_for(code, self._awaited)
                for rewrite in self.rewrites.get(stage, ()):
                    rewrite(code)

    def _assignment(self, graph: Graph, recipe: Recipe | None) -> Assignment | None:
        """Return what the ranks of a group divide; None without tensor parallelism.  Raises RefusedError."""
        shards, lengths = self._decision.shards, self._decision.token_slices
        return choice_for(graph, shards, recipe, lengths, self._held) if shards > 1 else None

    def _made(
        self, captured: Captured, recipe: Recipe | None, links: Sequence[Edge], stage: int, rule: BatchRule,
        shard: Callable[[StageModule], StageModule] | None,
    ) -> StageSlices:  # fmt: skip
        """Cut a stage out of `captured`, with a recipe once for each slice."""
        planned, adjusted = self._decision.stages[stage], rule.reduction.adjusted
        deferrable = stage in self._split
        if recipe is None:
            usual = parts(planned.division, 0, max(self._decision.micro_rows))  # of the largest planned micro-batch
            compiled = self._backend != EAGER and stage not in self.rewrites and captured.graph.rows in usual
            beside = compiled and stage in self._members and self._members[stage].beside  # then products of weights are
            code = stage_module(
                captured, links, stage, planned, self._device, adjusted, rule.layouts, eager=not compiled,
                deferrable=deferrable or beside, shard=shard,
            )  # fmt: skip
            return None, (self._compiled(captured, links, stage, code) if compiled else code,)
        outputs, lengths = leaving(captured.graph, links, stage, set(planned.ops)), self._decision.token_slices
        return slice_stage(
            captured, recipe, planned, outputs, lengths, self._device, adjusted, rule.layouts, deferrable=deferrable,
            shard=shard,
        )  # fmt: skip

    def _compiled(self, captured: Captured, links: Sequence[Edge], stage: int, code: StageModule) -> StageModule:
        """Compile the code of a stage for the tensors of a training step."""
        if self._compiler is None:
            self._compiler = COMPILERS[self._backend](captured.graph.op_map())
        specs = self.specs[captured.graph.rows]
        trained = {name for edge in links if edge.dst == stage for name in edge.grads}
        self._tensors.hold(code.held, captured.tensors)  # where ranks divide parameters, in pieces
        return self._compiler.compile(code, self._tensors.held, specs, trained, self._device)


def split_stages(decision: Decision) -> frozenset[int]:
    """Return the stages whose backwards the schedule splits into those of inputs and of weights.  O(computes)."""
    schedule = find(decision.schedule)
    if schedule.turns is not None and not schedule.splits:
        return frozenset()
    workers = pattern(schedule, Shape.of(decision)).workers
    return frozenset(stage for turns in workers for kind, stage, _ in turns if ACTIONS[kind].part_of)


def specs_of(
    graph: Graph, divided: Assignment | None = None, orders: Orders = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Return every value of a graph as a dense tensor on the meta device, by name.

    divided: among ranks, which pass on what they have of each.
    """
    found = {}
    for value in graph.values:
        shape = held_shape(graph, divided, value.name, value.shape)
        order = orders.get(value.name, tuple(range(len(shape))))
        found[value.name] = torch.empty_permuted(shape, order, dtype=getattr(torch, value.dtype), device="meta")
    return found


def sliced_layouts(
    graph: Graph, recipe: Recipe, lengths: Sequence[int], layouts: Layouts
) -> dict[str | tuple[str, int], RowLayout]:
    """Return how slices hold the rows of values whose tokens stand before the rows on one axis, by (value, slice): a
    slice has fewer entries before each row than the whole value."""
    found: dict[str | tuple[str, int], RowLayout] = {}
    shapes = {value.name: value.shape for value in graph.values}
    for name, layout in layouts.items():
        form = recipe.form(name)
        if layout is None or not any(
            held.axis == layout.axis and held.stride < layout.stride for _, held in form.roles()
        ):
            continue
        for number, part in enumerate(recipe.slices(lengths)):
            whole, own = shapes[name][layout.axis], form.shape(shapes[name], part)[layout.axis]
            found[name, number] = RowLayout(layout.axis, layout.stride * own // whole)
    return found

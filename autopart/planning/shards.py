"""Plans with tensor parallelism: what they cannot be combined with yet, and how they are made from plans for groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopart.ir.cluster import Cluster
from autopart.ir.decision import listed_runs
from autopart.ir.errors import AutopartError, InfeasibleError, RefusedError, UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Alternative, Plan
from autopart.options import Options
from autopart.passes.ops.table import op_name
from autopart.passes.pipeline import PlannerInput
from autopart.passes.program.schedules import find
from autopart.passes.proof.lower_bound import Beaten
from autopart.passes.search.space import PlanRequest
from autopart.passes.search.variants.slicing import even_lengths
from autopart.passes.shards.assignment import Assignment
from autopart.passes.shards.calls import ATTENTION
from autopart.passes.shards.choice import choose
from autopart.passes.shards.costs import GroupCosts, group_sizes, grouped, spelled_out
from autopart.passes.shards.states import CUT_KIND
from autopart.passes.shards.strategies import DROPOUTS
from autopart.passes.tokens.recipe import Recipe
from autopart.planning.derive.sliced_shards import choice_for, sliced_problem

Find = Callable[[PlannerInput, Graph | None, Cluster, PlanRequest], Plan]
"""Makes a plan, or finds it where plans are kept."""


def require_shardable(graph: Graph, options: Options, plan: Plan | None = None) -> None:
    """Raise RefusedError for what does not run, exactly, with tensor parallelism: nothing is silently wrong.

    plan: that is given or was made, None before planning."""
    for what, fix in _refusals(graph, options, plan):
        raise RefusedError(f"tensor_parallel does not run with {what} yet", fix=f"{fix}, or use tensor_parallel=1")


def _refusals(graph: Graph, options: Options, plan: Plan | None) -> Iterator[tuple[str, str]]:
    """Yield (what, what to do)."""
    given = (
        (options.replica_policy == "turn", "replicas in turn", 'use replica_policy="split"'),
        (options.weights is not None, "weights=", "build the model with values"),
        (options.schedule != "auto" and not find(options.schedule).synchronous, options.schedule, 'use "1f1b"'),
    )
    yield from ((what, fix) for present, what, fix in given if present)
    for op in graph.ops:
        if "batch_norm" in op.target and ("training", True) in op.attrs:
            yield f"batch statistics (module {op.module} at {op.where})", "put the norm into eval mode"
        name = op_name(op.target)
        if op.random and name not in (*DROPOUTS, ATTENTION):
            fix = "set its p to 0" if "dropout" in name else "give the model what it draws as an input"
            yield f"random numbers of {name} ({op.module or 'the model'}, {op.where})", fix
    if graph.before:
        yield "a plan that begins behind frozen layers", "train all layers"
    if plan is not None and not find(plan.schedule).synchronous:
        yield f"schedule {plan.schedule}", 'plan with "1f1b"'


def fastest(
    asked: PlannerInput,
    twin: Graph | None,
    cluster: Cluster,
    request: PlanRequest,
    options: Options,
    recipe: Recipe | None,
    find_plan: Find,
) -> Plan:
    """Return the plan for as many ranks in a group as the options say, or the fastest of those that fit into the
    innermost level, largest groups first, as these have the shortest search; the others are its alternatives.
    recipe: of slices of tokens.  find_plan: makes a plan.  Raises as it does, and RefusedError."""
    wanted = options.tensor_parallel
    plans, slower, failures = list[tuple[int, Plan]](), list[Alternative](), list[AutopartError]()
    ways = list[tuple[int, Assignment | None, PlanRequest]]()
    for shards in (wanted,) if isinstance(wanted, int) else reversed(group_sizes(cluster)):
        try:
            divided = ways_to_divide(asked.graph, shards, request, recipe, options) if shards > 1 else [(None, request)]
            ways += [(shards, *way) for way in divided]
        except (RefusedError, UsageError) as failure:
            failures.append(failure)
    for shards, assignment, own in ways:
        found = asked, twin, cluster, replace(own, rival_ns=min([plan.step_ns for _, plan in plans], default=0))
        try:
            if assignment is None:
                plans.append((1, find_plan(*found)))
            else:
                plans.append((shards, for_ranks(find_plan(*for_groups(*found, assignment)), asked.graph, shards)))
        except Beaten as beaten:
            slower.append(Alternative(_named(shards, own.token_slices), beaten.least_ns, "at least; not searched"))
        except (RefusedError, InfeasibleError, UsageError) as failure:
            failures.append(failure)
    if not plans:
        raise failures[-1]
    _, best = min(plans, key=lambda each: each[1].step_ns)
    slower += [
        Alternative(
            _named(n, plan.decision.token_slices), plan.step_ns, f"{plan.step_ns / max(1, best.step_ns) - 1:+.1%}"
        )
        for n, plan in plans
        if plan is not best
    ]
    outlook = replace(best.outlook, alternatives=(*best.outlook.alternatives, *slower))
    bounds = [plan.outlook.optimality.lower_bound for _, plan in plans if plan.outlook.optimality is not None]
    return replace(best, outlook=outlook.with_bound(min(bounds)) if bounds else outlook)


def _named(shards: int, lengths: tuple[int, ...] | str) -> str:
    cut = f", slices of {listed_runs(lengths)} tokens" if lengths and not isinstance(lengths, str) else ""
    return f"tensor_parallel={shards}{cut}"


def ways_to_divide(
    graph: Graph, shards: int, request: PlanRequest, recipe: Recipe | None, options: Options
) -> list[tuple[Assignment | None, PlanRequest]]:
    """Return what ranks may divide, each with the plans that may be searched for it.

    Where lengths of slices are open, and tokens can be cut inside of slices, these have lengths that allow it; else
    whole sequences with cut tokens are searched, and slices without.  Where their number is given, slices with cut
    tokens are searched, and those of the most even lengths.  Raises RefusedError."""
    require_shardable(graph, options)
    plain, lengths = choose(graph, shards), request.token_slices
    if recipe is None or not lengths:
        return [(plain, request)]
    if not isinstance(lengths, str):
        return _ways_to_slice(graph, plain, request, recipe, options)
    for step in (1, shards) if recipe.tokens > shards else (1,):
        if sliced_problem(graph, plain, recipe, (step, recipe.tokens - step)) is None:
            return [(plain, replace(request, token_step=step))]
    found = list[tuple[Assignment | None, PlanRequest]]([(plain, replace(request, token_slices=(), token_axis=None))])
    uncut = choose(graph, shards, tuple(plain.pieces(graph).items()), sequence=False)
    possible = sliced_problem(graph, uncut, recipe, (1, recipe.tokens - 1)) is None
    return [*found, (uncut, request)] if possible else found


def _ways_to_slice(
    graph: Graph, plain: Assignment, request: PlanRequest, recipe: Recipe, options: Options
) -> list[tuple[Assignment | None, PlanRequest]]:
    """Return the ways to divide slices of the lengths that are asked for, and of those that allow to cut tokens."""
    shards, lengths, count = plain.shards, request.token_slices, options.token_slices
    assert isinstance(lengths, tuple)
    found = list[tuple[Assignment | None, PlanRequest]]()
    if isinstance(count, int) and recipe.tokens % shards == 0 and count * shards <= recipe.tokens:
        even = even_lengths(recipe.tokens, count, shards)
        if even != lengths and sliced_problem(graph, plain, recipe, even) is None:
            found.append((plain, replace(request, token_slices=even)))
    try:
        return [*found, (choice_for(graph, shards, recipe, lengths), request)]
    except RefusedError:
        if not found:
            raise
        return found


def for_groups(
    asked: PlannerInput, twin: Graph | None, cluster: Cluster, request: PlanRequest, assignment: Assignment
) -> tuple[PlannerInput, Graph | None, Cluster, PlanRequest]:
    """Return what to plan for the groups of ranks that compute together."""
    groups, shards = grouped(cluster, assignment.shards), assignment.shards
    costs = GroupCosts(asked.cost_model, asked.graph, assignment, cluster)
    request = replace(request, shards=shards)
    asked = replace(asked, graph=costs.graph(asked.graph.size, 0), cost_model=costs, exchange_ns=costs.exchange_ns())
    return asked, twin, groups, request


def for_ranks(plan: Plan, graph: Graph, shards: int) -> Plan:
    """Return a plan for groups as one for their ranks.  graph: that all of them compute."""
    made_for = replace(plan.provenance, graph_digest=graph.shape_digest(), structure_digest=graph.structure_digest())
    spans = [line.removeprefix("rank ").partition(":") for line in plan.outlook.spans]
    outlook = replace(plan.outlook, spans=tuple([f"rank {int(rank) * shards}:{rest}" for rank, _, rest in spans]))
    found = replace(plan, provenance=made_for, decision=spelled_out(plan.decision, shards), outlook=outlook)
    return found.with_notes(*_notes(graph, shards))


def _notes(graph: Graph, shards: int) -> Iterator[str]:
    assignment = choose(graph, shards)
    whole = [p for p in graph.params if p.trainable and assignment.states[p.name].kind != CUT_KIND]
    large = [p for p in whole if len(p.shape) > 1]
    if large:
        more = f" and {len(large) - 1} more" if len(large) > 1 else ""
        yield f"tensor_parallel leaves {large[0].name}{more} whole on every rank: no op is cut along it"

"""The best order of a small pipeline, by constraint programming: an independent statement of what an order may be."""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from autopart.passes.ordering.pipeline import Pipeline

Variable = cp_model.IntVar


def best_step_ns(pipeline: Pipeline) -> int | None:
    """Return the nanoseconds of the shortest step of any order, proven; None if none fits in memory.

    Every backward is I and W, or a whole where W takes no time. Micro-batches are alike, so each stage takes them in
    order.
    """
    model = cp_model.CpModel()
    taken = {"F": pipeline.fwd_ns, "I": pipeline.input_ns, "W": pipeline.weight_ns}
    horizon = (
        pipeline.micros * sum(map(sum, taken.values()))
        + sum(after for way in (*pipeline.sends, *pipeline.returns) for _, after in way) * pipeline.micros
    )
    begin: dict[tuple[str, int, int], Variable] = {}
    for kind in taken:
        for s in range(pipeline.stages):
            for u in range(pipeline.micros):
                begin[kind, s, u] = model.new_int_var(0, horizon, f"{s}{kind}{u}")
            for u in range(pipeline.micros - 1):
                model.add(begin[kind, s, u] + taken[kind][s] <= begin[kind, s, u + 1])
    for s in range(pipeline.stages):
        for u in range(pipeline.micros):
            for first, then in pairwise("FIW"):
                model.add(begin[first, s, u] + taken[first][s] <= begin[then, s, u])
            if not pipeline.weight_ns[s]:
                model.add(begin["I", s, u] + taken["I"][s] == begin["W", s, u])
            for kind, ways in (("F", pipeline.sends), ("I", pipeline.returns)):
                for other, after in ways[s]:
                    model.add(begin[kind, s, u] + taken[kind][s] + after <= begin[kind, other, u])
    _add_workers(model, pipeline, begin)
    step = model.new_int_var(0, horizon, "step")
    model.add_max_equality(step, [start + taken[kind][s] for (kind, s, _), start in begin.items()])
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 60
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), "the oracle needs more time"
    return int(solver.objective_value) if status == cp_model.OPTIMAL else None


def _add_workers(model: cp_model.CpModel, pipeline: Pipeline, begin: dict[tuple[str, int, int], Variable]) -> None:
    """A worker does one compute at a time, and holds no more than it may."""
    taken = {"F": pipeline.fwd_ns, "I": pipeline.input_ns, "W": pipeline.weight_ns}
    for own, room in zip(pipeline.own, pipeline.room_bytes, strict=True):
        mine = [(key, start) for key, start in begin.items() if key[1] in own]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start, taken[kind][s], f"{s}{kind}{u}i") for (kind, s, u), start in mine]
        )
        times, changes = [], []
        for (kind, s, _), start in mine:
            held, kept = pipeline.held_bytes[s], pipeline.kept_bytes[s]
            change = {"F": held, "I": kept - held, "W": -kept}[kind]
            times.append(start if change > 0 else start + taken[kind][s])
            changes.append(change)
        if sum(change for change in changes if change > 0) > room:
            model.add_reservoir_constraint(times, changes, 0, room)

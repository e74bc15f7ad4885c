"""The best order of a small pipeline, by constraint programming: an independent statement of what an order may be."""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from autopart.passes.ordering.pipeline import Pipeline

Variable = cp_model.IntVar


def best_step_ns(pipeline: Pipeline) -> int | None:
    """Return the nanoseconds of the shortest step of any order, proven; None if none fits in memory.

    Every backward is I and W, or whole: then it keeps nothing between its parts, and its gradient leaves at its end.
    Micro-batches are alike, so each stage takes them in order.
    """
    model = cp_model.CpModel()
    taken = {"F": pipeline.fwd_ns, "I": pipeline.input_ns, "W": pipeline.weight_ns}
    horizon = (
        pipeline.micros * sum(map(sum, taken.values()))
        + sum(after for way in (*pipeline.sends, *pipeline.returns) for _, after in way) * pipeline.micros
    )
    begin: dict[tuple[str, int, int], Variable] = {}
    whole = {(s, u): model.new_bool_var(f"{s}B{u}") for s in range(pipeline.stages) for u in range(pipeline.micros)}
    for kind in taken:
        for s in range(pipeline.stages):
            for u in range(pipeline.micros):
                begin[kind, s, u] = model.new_int_var(0, horizon, f"{s}{kind}{u}")
            for u in range(pipeline.micros - 1):
                in_order = model.add(begin[kind, s, u] + taken[kind][s] <= begin[kind, s, u + 1])
                if kind == "W":
                    in_order.only_enforce_if(~whole[s, u], ~whole[s, u + 1])
    for s in range(pipeline.stages):
        for u in range(pipeline.micros):
            for first, then in pairwise("FIW"):
                model.add(begin[first, s, u] + taken[first][s] <= begin[then, s, u])
            if not pipeline.weight_ns[s]:
                model.add(whole[s, u] == 1)
            model.add(begin["I", s, u] + taken["I"][s] == begin["W", s, u]).only_enforce_if(whole[s, u])
            for other, after in pipeline.sends[s]:
                model.add(begin["F", s, u] + taken["F"][s] + after <= begin["F", other, u])
            for other, after in pipeline.returns[s]:
                model.add(begin["I", s, u] + taken["I"][s] + after <= begin["I", other, u])
                left = begin["W", s, u] + taken["W"][s] + after
                model.add(left <= begin["I", other, u]).only_enforce_if(whole[s, u])
    _add_workers(model, pipeline, begin, whole, horizon)
    step = model.new_int_var(0, horizon, "step")
    model.add_max_equality(step, [start + taken[kind][s] for (kind, s, _), start in begin.items()])
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 60
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), "the oracle needs more time"
    return int(solver.objective_value) if status == cp_model.OPTIMAL else None


def _add_workers(
    model: cp_model.CpModel,
    pipeline: Pipeline,
    begin: dict[tuple[str, int, int], Variable],
    whole: dict[tuple[int, int], Variable],
    horizon: int,
) -> None:
    """A worker does one compute at a time, and holds no more than it may."""
    taken = {"F": pipeline.fwd_ns, "I": pipeline.input_ns, "W": pipeline.weight_ns}
    for own, room in zip(pipeline.own, pipeline.room_bytes, strict=True):
        mine = [(key, start) for key, start in begin.items() if key[1] in own]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(start, taken[kind][s], f"{s}{kind}{u}i") for (kind, s, u), start in mine]
        )
        blocks, sizes = [], []
        for s, u in [(s, u) for kind, s, u in begin if kind == "F" and s in own]:
            held, kept, split = pipeline.held_bytes[s], pipeline.kept_bytes[s], ~whole[s, u]
            parted = begin["I", s, u] + (0 if kept > held else taken["I"][s])
            done = begin["W", s, u] + taken["W"][s]
            gone = model.new_int_var(0, horizon, f"{s}gone{u}")
            model.add(gone == parted).only_enforce_if(split)
            model.add(gone == done).only_enforce_if(whole[s, u])
            for first, last, size, there in ((begin["F", s, u], gone, held, True), (parted, done, kept, split)):
                length = model.new_int_var(0, horizon, f"{s}length{u}")
                blocks.append(model.new_optional_interval_var(first, length, last, there, f"{s}block{u}"))
                sizes.append(size)
        model.add_cumulative(blocks, sizes, room)

"""What autocast reads of a weight is made once a step: held like a weight, and neither timed nor kept by an op."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.languages.text import graph_text
from torch import nn
from torch.nn import functional as F

import autopart
from autopart.batch.batch import flatten
from autopart.capture import CaptureCache, Captured
from autopart.costs.sources import measured
from autopart.ir.cluster import Device
from autopart.ir.graph import Size
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.casts import CAST, cast_parameter, cast_values

CPU = Device("cpu", 1 << 34, 10**11, 10**10)
DATA = torch.ones(8, 16), torch.ones(8, 16)


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))


def captured(precision: str) -> Captured:
    captures = CaptureCache(layers(), F.mse_loss)
    captures.run_in(precision, "cpu")  # type: ignore[arg-type]
    return captures(flatten(DATA, with_target=True), Size(8))


def test_copies_are_held_and_neither_timed_nor_kept() -> None:
    found = captured("bf16")
    graph = analytic_costs(found.graph, CPU)
    params = graph.param_map()
    assert {param.copy_bytes for param in graph.params} == {16 * 16 * 2}
    assert set(cast_values(graph).values()) == set(params)
    for op in graph.ops:
        if cast_parameter(op, params) is not None:
            assert op.cost.fwd_ns == 0 and op.cost.saved_bytes == 0
        elif "linear" in op.target:  # its input alone: half precision, 8 rows
            assert op.cost.saved_bytes <= 8 * 16 * 2
    timed = measured(found, CPU).graph
    assert all(op.cost.fwd_ns == 0 for op in timed.ops if op.writes[0] in cast_values(timed))
    assert any(op.cost.fwd_ns > 0 for op in timed.ops)


def test_no_other_cast_is_one() -> None:
    graph = captured("bf16").graph
    params = graph.param_map()
    cast = next(op for op in graph.ops if cast_parameter(op, params) is not None)
    (name,) = cast.params
    assert all(cast_parameter(op, params) is None for op in graph.ops if op.target != CAST or op.reads)
    for wrong in (
        replace(cast, reads=("x",)),
        replace(cast, attrs=(*cast.attrs, ("memory_format", "torch.channels_last"))),
        replace(cast, attrs=(("self", f"%{name}"), ("dtype", "int64"))),
    ):
        assert cast_parameter(wrong, params) is None
    assert cast_parameter(cast, {name: replace(params[name], kind="buffer")}) is None


def test_a_plan_charges_weights_with_their_copies_and_half_the_message() -> None:
    whole, half = (
        autopart.plan(
            layers(), "cpu:2", sample=DATA, loss_fn=F.mse_loss, stages=2, micro_batches=2, precision=precision,
            cuts=["2"], costs="analytic", optimizer="sgd", cache=False, replicas=1,
        )
        for precision in ("fp32", "bf16")
    )  # fmt: skip
    for plain, cast in zip(whole.estimates, half.estimates, strict=True):
        assert cast.param_bytes == plain.param_bytes * 3 // 2
        assert cast.state_bytes == plain.state_bytes
    activation = 4 * 16 * 4  # beside it goes the target, as it is
    assert whole.estimates[0].out_bytes - half.estimates[0].out_bytes == activation // 2
    assert half.provenance.graph_digest != whole.provenance.graph_digest


def test_copies_stand_in_the_text_of_a_graph() -> None:
    assert "+0.weight:1024:float32[16,16]&512" in graph_text(captured("bf16").graph)

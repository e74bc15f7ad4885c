"""How losses combine: small losses of every form against ground truth, whole architectures, and random programs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.languages.loss_programs import Program, program
from support.models.loss_forms import EXACT, REFUSED, data
from support.models.zoo import CASES
from support.oracles.loss_oracle import MICRO_ROWS, Bench, derive
from torch import nn

from autopart.batch.batch import Batch, flatten
from autopart.capture import Captured, capture
from autopart.ir.errors import CaptureError, RefusedError, UsageError
from autopart.ir.graph import Graph, LossReduction
from autopart.ir.size import Size
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight
from autopart.planning.derive.rows import mark_rows

TOLERANCE = 1e-9
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning",  # torch's advice about reductions and broadcast targets, which these losses are made to have
)


@pytest.fixture(scope="module")
def exact() -> Bench:
    return Bench(
        [term for _, term in EXACT.values()],
        data(),
        lstm=nn.LSTM(4, 4, batch_first=True),
        gru=nn.GRU(4, 4),
        conv=nn.Conv1d(3, 4, 2),
        block=nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    )


@pytest.fixture(scope="module")
def refused() -> Bench:
    return Bench([term for _, term in REFUSED.values()], data())


@pytest.mark.parametrize("name", EXACT)
def test_a_loss_is_recognised_and_its_micro_batches_give_the_whole(exact: Bench, name: str) -> None:
    place = list(EXACT).index(name)
    weight = exact.weight(place)
    assert weight.kind == EXACT[name][0]
    assert exact.whole(place).error(exact.combined(place, weight)) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_couples_rows_is_refused_with_its_reason_and_place(refused: Bench, name: str) -> None:
    with pytest.raises(RefusedError) as error:
        refused.weight(list(REFUSED).index(name))
    assert REFUSED[name][0] in error.value.why
    assert "loss_forms.py" in error.value.where or "loss_oracle.py" in error.value.where
    assert error.value.fix


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_loss_is_no_combination_indeed(refused: Bench, name: str) -> None:
    """Refusals are not idle: neither sum nor mean nor a count of tokens gives the whole."""
    if name == "constant that holds the rows":
        pytest.skip("exact for this data; nothing in the graph says that it always is")
    place = list(REFUSED).index(name)
    for weight in (LossReduction("sum"), LossReduction("rows")):
        assert not refused.whole(place).error(refused.combined(place, weight)) < TOLERANCE


def test_what_is_stated_must_agree_with_what_is_derived(exact: Bench) -> None:
    places = {name: place for place, name in enumerate(EXACT)}
    assert exact.weight(places["mean"], stated="mean").kind == "rows"
    assert exact.weight(places["cross entropy"], stated="mean").kind == "tokens"
    assert exact.weight(places["regulariser alone"], stated="sum").kind == "any"
    for name, stated in (("mean", "sum"), ("sum", "mean"), ("mean", "token-mean"), ("cross entropy", "sum")):
        with pytest.raises(UsageError, match=stated):
            exact.weight(places[name], stated=stated)


def opaque(graph: Graph) -> Graph:
    """The same graph with means that no rule knows."""
    renamed = (replace(op, target="mylib.f.default") if "mean" in op.target else op for op in graph.ops)
    return replace(graph, ops=tuple(renamed))


def test_an_unknown_op_is_not_guessed_and_what_is_stated_of_an_opaque_loss_has_to_be_tried() -> None:
    bench = Bench([lambda s, x, y, t, m: (y * s.w).mean(), lambda s, x, y, t, m: (y * s.w).sum()], data())
    first, second = (opaque(c.graph) for c in bench.captures)
    graph, other = (replace(g, outputs=(bench.names[0],)) for g in (mark_rows(first, second), second))
    with pytest.raises(UnprovenRows, match="no rule") as error:
        derive_loss_weight(graph, other)
    assert not error.value.names and "loss_reduction" in error.value.refusal.fix
    for stated, meanings in (("mean", ("rows",)), ("sum", ("sum",)), ("token-mean", ())):
        with pytest.raises(UnprovenRows) as error:
            derive_loss_weight(graph, other, stated=stated)
        assert error.value.stated == tuple(map(LossReduction, meanings))


class Counting(nn.Module):
    """A buffer that every forward changes, read or not; batch norm beside it."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.norm, self.reads = nn.BatchNorm1d(4), reads
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().square().sum()
        return self.norm(x).square().mean() / (self.seen if self.reads else 1)


@pytest.mark.parametrize("reads", [False, True])
def test_a_buffer_that_changes_may_not_reach_the_loss(reads: bool) -> None:
    parts, model = flatten(torch.randn(5, 4)), Counting(reads)
    first, second = (capture(model, parts, size=Size(rows)) for rows in MICRO_ROWS)
    if not reads:
        assert derive(first, second, parts) == LossReduction("rows")
        return
    with pytest.raises(RefusedError, match="buffer seen"):
        derive(first, second, parts)


def test_a_vector_is_no_loss() -> None:
    bench = Bench([lambda s, x, y, t, m: (y * s.w).mean()], data())
    first, second = (c.graph for c in bench.captures)
    rows = next(v.name for v in mark_rows(first, second).values if v.grad and v.rows_axis == 0)
    with pytest.raises(CaptureError):
        derive_loss_weight(*(replace(g, outputs=(rows,)) for g in (mark_rows(first, second), second)))


FAST = ("bert",)


@cache
def captures(name: str) -> tuple[Captured, Captured, Batch]:
    parts, model = flatten(CASES[name].data(4)), CASES[name].model()
    first, second = (capture(model, parts, size=Size(rows)) for rows in MICRO_ROWS)
    return first, second, parts


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_an_architecture_gets_its_weight(name: str) -> None:
    weight = derive(*captures(name))
    assert weight.kind == "tokens" and weight.ignore == -100


@pytest.mark.slow
def test_only_experts_and_constants_need_the_numeric_test() -> None:
    first, second, _ = captures("mixtral")
    with pytest.raises(UnprovenRows, match="sort"):
        derive_loss_weight(mark_rows(first.graph, second.graph), second.graph)
    first, second, _ = captures("t5")
    with pytest.raises(UnprovenRows, match="constant") as error:
        derive_loss_weight(mark_rows(first.graph, second.graph), second.graph)
    assert all(name.startswith("constant.") for name in error.value.names)


def once(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, phases=[Phase.generate])


@once(1)
@given(st.integers(0, 10_000))
def test_whatever_is_accepted_is_exact(seed: int) -> None:
    check_accepted(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # fifty times twenty programs
@once(50)
@given(st.integers(10_000, 10_000_000))
def test_whatever_is_accepted_is_exact_at_length(seed: int) -> None:
    check_accepted(seed)


def check_accepted(seed: int) -> None:
    """Soundness: of random programs, every one that gets a weight gives the whole loss and gradient with it."""
    source = random.Random(seed)
    programs: list[Program] = [program(source, data()) for _ in range(20)]
    for bench, captured in benches(programs):
        for place, made in enumerate(captured):
            try:
                weight = bench.weight(place)
            except RefusedError:
                continue
            assert bench.whole(place).error(bench.combined(place, weight)) < 1e-7, (made, weight)


def benches(programs: list[Program]) -> Iterator[tuple[Bench, list[Program]]]:
    """All programs in one capture; where one cannot be captured, in halves."""
    try:
        yield Bench([p.term for p in programs], data()), programs
    except (RefusedError, CaptureError):
        half = len(programs) // 2
        for part in (programs[:half], programs[half:]) if half else ():
            yield from benches(part)

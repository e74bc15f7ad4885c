"""How losses combine: small losses of every form against ground truth, whole architectures, and random programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.models.loss_forms import EXACT, REFUSED, data
from support.models.zoo import CASES
from support.oracles.loss_oracle import MICRO_ROWS, Bench, Term, Terms, derive
from torch import nn
from torch.nn import functional as F

from autopart.batch.batch import Batch, flatten
from autopart.capture import Captured, capture
from autopart.ir.errors import CaptureError, RefusedError, UsageError
from autopart.ir.graph import Graph, LossReduction, Size
from autopart.passes.loss.derive import UnprovenRows, derive_loss_weight
from autopart.planning.derive.family import mark_rows

Step = tuple[str, tuple[int, ...]]
Op = Callable[..., torch.Tensor]

UNARY: dict[str, Op] = {
    "tanh": lambda s, n, a: a.tanh(),
    "exp": lambda s, n, a: (a * 0.3).exp(),
    "square": lambda s, n, a: a**2,
    "negate": lambda s, n, a: 1 - a,
    "times w": lambda s, n, a: a * s.w,
    "linear": lambda s, n, a: F.linear(a, s.k, s.w),
    "matmul": lambda s, n, a: s.k @ a,
    "positive": lambda s, n, a: a > 0,
    "double": lambda s, n, a: a.double(),
    "index": lambda s, n, a: (a.abs() * 10).long() % 4,
    "clamp": lambda s, n, a: a.clamp(min=1),
    "per row": lambda s, n, a: a / n,
    "by rows": lambda s, n, a: a * n,
    "per element": lambda s, n, a: a / a.numel(),
    "plus rows": lambda s, n, a: a + n,
    "transpose": lambda s, n, a: a.transpose(0, 1),
    "mT": lambda s, n, a: a.mT,
    "permute": lambda s, n, a: a.permute(2, 0, 1),
    "flatten": lambda s, n, a: a.flatten(0, 1),
    "features": lambda s, n, a: a.flatten(1),
    "by four": lambda s, n, a: a.reshape(-1, 4),
    "rows first": lambda s, n, a: a.reshape(n, -1),
    "sequence first": lambda s, n, a: a.reshape(3, n, 4),
    "front axis": lambda s, n, a: a.unsqueeze(0),
    "last axis": lambda s, n, a: a.unsqueeze(-1),
    "sum all": lambda s, n, a: a.sum(),
    "mean all": lambda s, n, a: a.mean(),
    "std": lambda s, n, a: a.std(),
    "layer norm": lambda s, n, a: F.layer_norm(a, (a.shape[-1],)),
    "layer norm all": lambda s, n, a: F.layer_norm(a, tuple(a.shape)),
    "group norm": lambda s, n, a: F.group_norm(a, 1),
    "pool": lambda s, n, a: F.avg_pool1d(a, 2),
    "pool 2d": lambda s, n, a: F.max_pool2d(a, 2),
    "embed": lambda s, n, a: F.embedding(a, s.k),
    "one hot": lambda s, n, a: F.one_hot(a, 4),
    "pad": lambda s, n, a: F.pad(a, (0, 1)),
    "pick all": lambda s, n, a: a[torch.arange(a.shape[0])],
    "drop first": lambda s, n, a: a[1:],
    "drop second": lambda s, n, a: a[:, 1:],
    "first": lambda s, n, a: a[0],
    "second": lambda s, n, a: a[:, 0],
    "as many as rows": lambda s, n, a: a[:n],
    "repeat": lambda s, n, a: a.repeat(2, *([1] * (a.dim() - 1))),
    "repeat rows": lambda s, n, a: a.repeat(n, *([1] * (a.dim() - 1))),
    "interleave": lambda s, n, a: a.repeat_interleave(2, 0),
    "expand": lambda s, n, a: a.expand(n, *a.shape),
    "half": lambda s, n, a: a.chunk(2, 0)[0],
    "unbind": lambda s, n, a: a.unbind(1)[0],
    "zeros": lambda s, n, a: torch.ones_like(a),
}
for _axis in (0, 1, -1):
    for _name, _op in {
        "sum": torch.sum,
        "mean": torch.mean,
        "softmax": torch.softmax,
        "amax": torch.amax,
        "flip": lambda a, d: a.flip(d),
        "cumsum": torch.cumsum,
        "sort": lambda a, d: a.sort(d)[0],
        "argmax": torch.argmax,
        "any": lambda a, d: (a > 0).any(d),
    }.items():
        UNARY[f"{_name} {_axis}"] = lambda s, n, a, op=_op, d=_axis: op(a, d)
    UNARY[f"mean {_axis} kept"] = lambda s, n, a, d=_axis: a.mean(d, keepdim=True)
BINARY: dict[str, Op] = {
    "add": lambda s, n, a, b: a + b,
    "sub": lambda s, n, a, b: a - b,
    "mul": lambda s, n, a, b: a * b,
    "div": lambda s, n, a, b: a / (b.abs() + 0.5),
    "ratio": lambda s, n, a, b: a / b,
    "where": lambda s, n, a, b: torch.where(a > 0, a, b),
    "product": lambda s, n, a, b: a @ b,
    "scores": lambda s, n, a, b: a @ b.mT,
    "per batch": lambda s, n, a, b: torch.einsum("b...d,bd->b...", a, b),
    "over batch": lambda s, n, a, b: torch.einsum("b...,b...->...", a, b),
    "attention": lambda s, n, a, b: F.scaled_dot_product_attention(a, b, b),
    "cross entropy": lambda s, n, a, b: F.cross_entropy(a, b, ignore_index=1),
    "cross entropy, weighed": lambda s, n, a, b: F.cross_entropy(a, b, weight=s.c, ignore_index=1),
    "cross entropy, none": lambda s, n, a, b: F.cross_entropy(a, b, reduction="none"),
    "cross entropy, sum": lambda s, n, a, b: F.cross_entropy(a, b, reduction="sum"),
    "mse": lambda s, n, a, b: F.mse_loss(a, b),
    "cosine": lambda s, n, a, b: F.cosine_similarity(a, b, dim=-1),
    "pick": lambda s, n, a, b: a[torch.arange(n), b],
    "take": lambda s, n, a, b: a[b],
    "take second": lambda s, n, a, b: a[:, b],
    "gather": lambda s, n, a, b: a.gather(-1, b.unsqueeze(-1)),
    "join": lambda s, n, a, b: torch.cat([a, b], 0),
    "join second": lambda s, n, a, b: torch.cat([a, b], 1),
    "stack": lambda s, n, a, b: torch.stack([a, b], 0),
    "stack second": lambda s, n, a, b: torch.stack([a, b], 1),
    "like": lambda s, n, a, b: a.expand_as(b),
    "place": lambda s, n, a, b: a.slice_scatter(b[:, :1], 1, 0, 1),
}
CONSTANT: dict[str, Op] = {
    "k": lambda s, n: s.k.tanh(),
    "ones": lambda s, n: torch.ones(n, 1, dtype=torch.float64),
    "shares": lambda s, n: torch.full((n, 1), 1.0 / n, dtype=torch.float64),
    "rows": lambda s, n: torch.full((4,), n, dtype=torch.float64),
    "row numbers": lambda s, n: torch.arange(n),
    "three to a row": lambda s, n: torch.arange(3 * n),
    "as many of k": lambda s, n: s.k[:n],
    "one of k": lambda s, n: s.k[n % 3],
    "identity": lambda s, n: torch.eye(n, dtype=torch.float64),
}
OPS = UNARY | BINARY | CONSTANT
ENDS: dict[str, Op] = {
    "sum": lambda s, n, z, q: z.sum(),
    "mean": lambda s, n, z, q: z.mean(),
    "mean + 1": lambda s, n, z, q: z.mean() * 0.5 + 1,
    "sum / rows": lambda s, n, z, q: z.sum() / n,
    "masked mean": lambda s, n, z, q: (z * q).sum() / q.sum(),
    "mean of masked": lambda s, n, z, q: (z * q.double()).mean() / q.double().mean(),
    "sum by count": lambda s, n, z, q: z.sum() / q.sum(),
    "floored": lambda s, n, z, q: (z * q).sum() / q.sum().clamp(min=2),
    "sum + mean": lambda s, n, z, q: (z.sum() + z.mean() * 0.5) / 3,
    "sum + masked mean": lambda s, n, z, q: 0.1 * z.square().sum() + (z * q).sum() / q.sum() - s.v,
    "stack": lambda s, n, z, q: torch.stack([z.sum(), z.mean(), s.v, q.double().mean()]).mean(),
}


@dataclass(frozen=True)
class Program:
    """steps: ops and the positions of their operands; end: how the last value becomes a loss, with the sign of
    `mask`.
    """

    steps: tuple[Step, ...]
    end: str
    mask: int

    @property
    def term(self) -> Term:
        """The program as a loss function."""

        def loss(s: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
            values, rows = self.values(s, inputs), inputs[0].shape[0]
            z = values[-1].double()
            z = z * s.w if z.dim() > 1 and z.shape[-1] == 4 else z * s.v
            return ENDS[self.end](s, rows, z, values[self.mask] > 0)

        return loss

    def values(self, s: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Return the inputs and the result of every step."""
        values, rows = list(inputs), inputs[0].shape[0]
        for name, operands in self.steps:
            values.append(OPS[name](s, rows, *(values[i] for i in operands)))
        return values


def program(source: random.Random, data: tuple[torch.Tensor, ...]) -> Program:
    """Return a program that runs on the whole batch, with a finite loss, and on each micro-batch."""
    model = Terms([], {})
    pieces = list(zip(*(tensor.split(list(MICRO_ROWS)) for tensor in data), strict=True))
    made = Program((), source.choice(list(ENDS)), source.randrange(4))
    wanted = source.randint(1, 6)
    for _ in range(40 * wanted):
        name = source.choice(list(OPS))
        count = 1 if name in UNARY else 2 if name in BINARY else 0
        places = len(made.steps) + 4
        operands = tuple(places - 1 if source.random() < 0.6 else source.randrange(places) for _ in range(count))
        longer = Program((*made.steps, (name, operands)), made.end, made.mask)
        if _runs(longer, model, data, finite=True) and all(_runs(longer, model, piece) for piece in pieces):
            made = longer
        if len(made.steps) == wanted:
            break
    return made


def _runs(candidate: Program, model: nn.Module, inputs: tuple[torch.Tensor, ...], *, finite: bool = False) -> bool:
    try:
        loss = candidate.term(model, *inputs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return (
        loss.dim() == 0 and (not finite or bool(loss.isfinite())) and candidate.values(model, inputs)[-1].numel() < 2000
    )


# -- tests -----------------------------------------------------------------------------------------------------------


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
    return settings(max_examples=examples, derandomize=True, phases=[Phase.generate])


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

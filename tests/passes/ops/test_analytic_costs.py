"""Costs without a measurement: operations against torch's own counter, saved bytes against what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models.zoo import CASES
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autopart.batch.batch import flatten
from autopart.capture import Captured, capture
from autopart.ir.cluster import DEVICE_KINDS, Device
from autopart.ir.graph import check_cost
from autopart.passes.ops.analytic_costs import analytic_costs, saved_values
from autopart.passes.ops.flops import backward_flops, flops
from autopart.passes.ops.letters import einsum_letters
from autopart.passes.ops.row import check as check_row
from autopart.passes.ops.table import _ROWS, op_name, row_of

DEVICE = Device("cpu", 1 << 34, 100_000_000_000, 20_000_000_000)
LAUNCH_NS = DEVICE_KINDS["cpu"].launch_ns


class Model(nn.Module):
    """f of an input and the model as a loss."""

    def __init__(self, f: Callable[..., torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.randn(8))
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.f(self, *inputs)


def captured(f: Callable[..., torch.Tensor], *inputs: torch.Tensor, **modules: nn.Module) -> Captured:
    return capture(Model(f, **modules), flatten(tuple(inputs)))


def products(s: nn.Module, x: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Every op that torch counts."""
    heads = s.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
    scores = heads @ heads.mT
    mixed = F.scaled_dot_product_attention(heads, heads, heads) + scores.softmax(-1) @ heads
    flat = torch.addmm(s.w, mixed.transpose(1, 2).reshape(-1, 8), s.linear.weight)
    return (
        flat.sum()
        + torch.bmm(x, x.mT).sum()
        + (x @ s.w).sum()
        + s.conv(images).sum()
        + s.grouped(images).sum()
        + s.up(images).sum()
        + torch.einsum("bsd,btd->bst", x, x).sum()
    )


def modules() -> dict[str, nn.Module]:
    return {
        "linear": nn.Linear(8, 8),
        "conv": nn.Conv2d(4, 6, 3, stride=2, padding=1),
        "grouped": nn.Conv2d(4, 8, 3, groups=2),
        "up": nn.ConvTranspose2d(4, 6, 3, stride=2),
    }


def test_operations_equal_torchs_own_count() -> None:
    inputs = torch.randn(3, 5, 8), torch.randn(3, 4, 9, 9)
    graph = captured(products, *inputs, **modules()).graph
    model = Model(products, **modules())
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    values, params = graph.value_map(), graph.param_map()
    counted = {op.name: flops(op, values, params) for op in graph.ops if row_of(op.target).family == "matmul"}
    # torch counts neither attention on a CPU nor a matrix times a vector
    attention = 2 * 3 * 2 * (5 * 4 * 5) * 2
    assert counted.pop("scaled_dot_product_attention") == attention
    assert sum(counted.values()) == counter.get_total_flops() + 2 * 3 * 5 * 8


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_operations_of_a_whole_step_equal_torchs_own_count(name: str) -> None:
    case = CASES[name]
    batch, model = case.data(3), case.model()
    graph = capture(model, flatten(batch)).graph
    values, params = graph.value_map(), graph.param_map()
    attention = "scaled_dot_product_attention"  # torch counts none on a CPU
    products = [op for op in graph.ops if row_of(op.target).family == "matmul" and op_name(op.target) != attention]
    with FlopCounterMode(display=False) as counter:
        loss = model(**batch).loss
        forward = counter.get_total_flops()
        loss.backward()
    assert sum(flops(op, values, params) for op in products) == forward
    assert sum(backward_flops(op, values, params) for op in products) == counter.get_total_flops() - forward


def test_backward_counts_what_needs_a_gradient() -> None:
    frozen = nn.Linear(8, 8)
    frozen.requires_grad_(False)

    def loss(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = s.trained(x)  # weight only
        second = s.frozen(first)  # input only
        return (s.trained(second) + s.frozen(x)).sum()  # both; neither

    graph = captured(loss, torch.randn(3, 8), trained=nn.Linear(8, 8), frozen=frozen).graph
    values, params = graph.value_map(), graph.param_map()
    linears = [op for op in graph.ops if op_name(op.target) == "linear"]
    work = [flops(op, values, params) for op in linears]
    assert [backward_flops(op, values, params) // w for op, w in zip(linears, work, strict=True)] == [1, 1, 2, 0]


SAVING: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "mlp": lambda s, x: s.b(torch.relu(s.a(x))).square().sum(),
    "gelu": lambda s, x: s.b(F.gelu(s.a(x))).sum(),
    "norm": lambda s, x: s.b(F.layer_norm(s.a(x), (8,)) + x).sum(),
    "softmax": lambda s, x: (s.a(x).softmax(-1) * s.b(x)).tanh().sum(),
    "views": lambda s, x: (s.a(x).mT.flatten(1).exp() * 2).sum(),
    "attention": lambda s, x: (s.a(x) @ s.b(x).mT).softmax(-1).matmul(x).sum(),
    "product": lambda s, x: (s.a(x) * s.a(x).sigmoid() / (1 + s.b(x) ** 2)).mean(),
    "pool of a line": lambda s, x: F.avg_pool1d(s.a(x), 2).exp().sum(),
    "pool of a plane": lambda s, x: F.avg_pool2d(s.a(x) * 2, 2).sum(),
    "nearest": lambda s, x: F.interpolate(s.a(x)[:, None], scale_factor=2.0, mode="nearest-exact").square().sum(),
    "group norm": lambda s, x: F.group_norm(s.a(x), 4).sum() + F.group_norm(s.b(x), 16).sum(),
    "frozen head": lambda s, x: (s.a(x.detach()) * 3).sum(),
    "heads": lambda s, x: s.b(heads_of(s.a(x))).sum(),
    "heads, a mask of bools": lambda s, x: s.b(heads_of(s.a(x), attn_mask=x[:, None, :, :1] < 9)).sum(),
    "heads, a trained mask": lambda s, x: s.b(heads_of(s.a(x), attn_mask=s.b(x[:1]).sum(-1)[:, None, None])).sum(),
    "heads, dropout": lambda s, x: s.b(heads_of(s.a(x), dropout_p=0.1)).sum(),
    "parts of one product": lambda s, x: torch.mul(*(p.reshape(64, 16, 2, 2) for p in s.a(x).split(4, -1))).sum(),
    "maximum of a plane": lambda s, x: F.max_pool2d(s.a(x), 2).square().sum(),
    "batch norm": lambda s, x: F.batch_norm(s.a(x), None, None, training=True).sum(),
}


def heads_of(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the attention of two heads of four, side by side again."""
    q, k, v = ((x * scale).unflatten(-1, (2, 4)).transpose(1, 2) for scale in (1, 2, 3))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("name", SAVING)
def test_saved_bytes_are_what_autograd_keeps(name: str) -> None:
    inputs = torch.randn(64, 16, 8)
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    graph = analytic_costs(captured(SAVING[name], inputs, **parts).graph, DEVICE)
    kept = packed_bytes(Model(SAVING[name], **parts), inputs)
    assert sum(op.cost.saved_bytes for op in graph.ops) == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize(("kind", "options"), [("LSTM", {"num_layers": 2}), ("GRU", {"bidirectional": True})])
def test_saved_bytes_of_recurrent_layers_are_what_autograd_keeps(kind: str, options: dict[str, Any]) -> None:
    layer, inputs = getattr(nn, kind)(64, 64, batch_first=True, **options), torch.randn(8, 48, 64)
    forward = lambda s, x: s.layer(x)[0].sum()  # noqa: E731
    graph = analytic_costs(captured(forward, inputs, layer=layer).graph, DEVICE)
    kept = packed_bytes(Model(forward, layer=layer), inputs)
    assert sum(op.cost.saved_bytes for op in graph.ops) == pytest.approx(kept, rel=0.1)


def packed_bytes(model: nn.Module, inputs: torch.Tensor) -> int:
    """Return the bytes of the storages that autograd packs for the backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs)
    del loss
    return sum(kept.values())


def test_dropout_and_cross_entropy_keep_what_is_no_value_of_the_graph() -> None:
    def loss(s: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.dropout(s.a(x), 0.5), t)

    graph = captured(loss, torch.randn(4, 8), torch.randint(0, 8, (4,)), a=nn.Linear(8, 8)).graph
    costs = {op_name(op.target): op.cost for op in analytic_costs(graph, DEVICE).ops}
    assert costs["native_dropout"].saved_bytes == 4 * 8  # one byte per element
    assert costs["cross_entropy_loss"].saved_bytes >= 4 * 8 * 4 + 4 * 8  # log-softmax and targets


def test_nothing_is_kept_and_no_backward_runs_without_a_gradient() -> None:
    graph = captured(lambda s, x: (x.tanh() @ x.mT).sum() * s.w.sum(), torch.randn(3, 5, 8)).graph
    costed = analytic_costs(graph, DEVICE)
    values, params = graph.value_map(), graph.param_map()
    for op in costed.ops:
        check_cost(op.cost)
        if not any(values[w].grad for w in op.writes):
            assert op.cost.bwd_ns == 0 and op.cost.saved_bytes == 0 and not saved_values(op, values, params)


def test_times_follow_the_roofline() -> None:
    graph = captured(lambda s, x: (x @ x.mT * s.w.sum()).sum(), torch.randn(2, 256, 512)).graph
    slow = Device("cpu", 1 << 34, 50_000_000_000, 20_000_000_000)
    fast, half = (
        next(op.cost for op in analytic_costs(graph, device).ops if op_name(op.target) == "matmul")
        for device in (DEVICE, slow)
    )
    work = 2 * 2 * 256 * 256 * 512
    assert fast.flops == work
    assert fast.fwd_ns == -(-work * 10**9 // DEVICE.flops_per_s) + LAUNCH_NS
    assert half.fwd_ns - LAUNCH_NS == pytest.approx(2 * (fast.fwd_ns - LAUNCH_NS), abs=2)
    views = [op for op in analytic_costs(graph, DEVICE).ops if row_of(op.target).family == "view"]
    assert views and all(op.cost.fwd_ns == LAUNCH_NS and op.cost.flops == 0 for op in views)


def test_the_rate_is_that_of_the_dtype_an_op_computes_in() -> None:
    def costs(dtype: torch.dtype, device: Device) -> dict[str, int]:
        x = torch.randn(2, 256, 512).to(dtype)
        graph = captured(lambda s, x: (x @ x.mT > 0).sum() * s.w.sum(), x).graph
        return {op_name(op.target): op.cost.fwd_ns - LAUNCH_NS for op in analytic_costs(graph, device).ops}

    rates = (("bfloat16", 4 * DEVICE.flops_per_s), ("float32", DEVICE.flops_per_s // 2))
    device = Device("cpu", 1 << 34, DEVICE.flops_per_s, 10**15, "X", rates)
    single, half, double = (costs(d, device)["matmul"] for d in (torch.float32, torch.bfloat16, torch.float64))
    assert single == pytest.approx(2 * double, abs=2) and double == pytest.approx(4 * half, abs=4)
    comparison = costs(torch.bfloat16, device)["gt"]  # its result is boolean: the operand says what it computes in
    assert comparison == pytest.approx(costs(torch.float64, device)["gt"] / 4, abs=4)


def test_the_rows_of_the_table_are_valid_and_names_find_them() -> None:
    assert all(row.name == name and check_row(row) is row for name, row in _ROWS.items())
    assert op_name("aten.__and__.Tensor") == "__and__" and op_name("mylib.f.default") == "mylib.f"
    assert row_of("aten.max.other").family == "pointwise" and row_of("aten.max.dim").family == "reduction"
    assert row_of("mylib.f.default").family == "other" and not row_of("mylib.f.default").axes


def test_einsum_equations() -> None:
    assert einsum_letters("ab,bc->ac", [(1, 2), (2, 3)]) == ([("a", "b"), ("b", "c")], ("a", "c"))
    assert einsum_letters("ab,bc", [(1, 2), (2, 3)]) == ([("a", "b"), ("b", "c")], ("a", "c"))
    assert einsum_letters("...a,a->...", [(1, 2, 3), (3,)]) == ([(".1", ".0", "a"), ("a",)], (".1", ".0"))
    assert einsum_letters("a,b,c->", [(1,), (2,)]) is None


def test_attention_with_dropout_keeps_its_scores_on_a_cpu_alone() -> None:
    def loss(s: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = x * s.w.sum()
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.1).sum()

    graph = captured(loss, torch.randn(2, 4, 64, 8)).graph
    gpu = Device("cuda", 1 << 34, 10**14, 10**12)
    here, there = (
        next(op.cost for op in analytic_costs(graph, device).ops if "attention" in op.target)
        for device in (DEVICE, gpu)
    )
    size, queries = 4 * 2 * 4 * 64 * 8, 2 * 4 * 64
    assert there.saved_bytes == 2 * size + 4 * queries
    assert here.saved_bytes == 3 * size + 3 * 4 * queries * 64  # values, scaled queries and keys; scores three times

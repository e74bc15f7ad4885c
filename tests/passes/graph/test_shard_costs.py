"""The plain rule against the cheapest assignment of one block, and what a group's graph costs at other sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import transformers as hf
from support.extending.shard_oracle import SPARE, Oracle, held_bytes, total_ns
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture
from autopart.files.clusters import parse_cluster
from autopart.ir.cluster import Cluster, Level, Link
from autopart.ir.decision import Stage
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph, Size
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import CostModel
from autopart.passes.shards.calls import calls_of
from autopart.passes.shards.choice import choose
from autopart.passes.shards.costs import GroupCosts, group_sizes, grouped
from autopart.passes.shards.states import GATHER, SCATTER, transition
from autopart.passes.simulation.charges import StageContext
from autopart.passes.simulation.stage_costs import Estimator, device_types

WORDS, TOKENS = 32_768, 1024
NODE = parse_cluster("h100x8")
FAST = Level(8, Link(0, 10**18))


class GatedMlp(nn.Module):
    """A table of words, a gated MLP with a norm and a residual, and a head."""

    def __init__(self, wide: int = 4096, inside: int = 14_336) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, wide), nn.Linear(wide, WORDS)
        self.layers = nn.ModuleList(
            [nn.RMSNorm(wide), nn.Linear(wide, inside), nn.Linear(wide, inside), nn.Linear(inside, wide)]
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        norm, gate, up, down = self.layers
        y = norm(x)
        x = x + down(nn.functional.silu(gate(y)) * up(y))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def llama(layers: int = 1) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def gpt2(layers: int = 1) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=WORDS, n_embd=4096, n_layer=layers, n_head=32, n_positions=TOKENS, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


BLOCKS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "gated MLP": GatedMlp}


@lru_cache(maxsize=4)
def graph_of(make: Callable[..., nn.Module], *given: int) -> Graph:
    with torch.device("meta"):
        model, ids = make(*given).bfloat16().eval(), torch.zeros((4, TOKENS), dtype=torch.long)
    return analytic_costs(capture(model, flatten({"input_ids": ids, "labels": ids})).graph, NODE.devices[0])


def costs_of(graph: Graph, shards: int, cluster: Cluster = NODE) -> GroupCosts:
    return GroupCosts(CostModel(graph, None, device_types(cluster)), graph, choose(graph, shards), cluster)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_costs_at_most_2_percent_more_than_the_solver_proves(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupCosts, "_widths", lambda *_: None)  # the solver's work of an op does not depend on widths
    monkeypatch.setattr(GroupCosts, "_may_overlap", False)  # nor on what runs beside it
    graph = graph_of(BLOCKS[name])
    rule = costs_of(graph, 8)
    assert held_bytes(graph, rule.assignment) <= SPARE / 8
    inside = [n for n, op in enumerate(graph.ops) if re.search(r"(layers|\bh)\.\d", op.module)]
    block = {op.name for op in graph.ops[inside[0] : inside[-1] + 2]}  # with its residual
    assert len(block) > 6
    found, bound = Oracle(graph, NODE, 8, rule, block).least_ns(60.0)
    print(f"{name}: rule {total_ns(rule) / 1e6:.3f} ms, solver {found / 1e6:.3f}, at least {bound / 1e6:.3f}")
    assert bound <= total_ns(rule) * 1.001 and total_ns(rule) <= 1.02 * bound


@pytest.mark.parametrize(("make", "layer"), [(llama, "model.layers.1"), (gpt2, "transformer.h.1")])
def test_a_block_has_two_gathers_and_two_sums_each_way(make: Callable[..., nn.Module], layer: str) -> None:
    graph = graph_of(make, 3)
    found, seen = choose(graph, 8), set()
    forward, backward = Counter[str](), Counter[str]()
    grads = {v.name for v in graph.values if v.grad}
    for call in calls_of(graph):
        for name, held, wanted in found.reads(call.op, call):
            if call.op.module.startswith(layer) and name in grads and (name, wanted) not in seen:
                seen.add((name, wanted))
                change = transition(held, wanted)
                forward[change.forward] += 1
                backward[change.backward] += 1
    moved = {GATHER: 2, SCATTER: 2}
    for way in (forward, backward):
        assert {word: count for word, count in way.items() if word not in ("keep", "slice")} == moved


def test_exchanges_grow_with_rows_and_what_is_gathered_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(llama)
    monkeypatch.setattr(GroupCosts, "_may_overlap", False)
    costs = costs_of(graph, 8)
    wide, whole = costs.graph(Size(4), 0).op_map(), graph.op_map()
    values = graph.value_map()
    product = next(op for op in graph.ops if op.module.endswith("q_proj"))
    gathered = values[product.reads[0]].size_bytes
    assert wide[product.name].cost.saved_bytes == pytest.approx(
        whole[product.name].cost.saved_bytes / 8 + gathered * 7 / 8, abs=8
    )
    exchanged = NODE.levels[0].link.latency_ns + gathered * 7 / 8 * 1e9 / NODE.levels[0].link.bytes_per_s
    part, every = 32 * 4, 32 * 32  # tiles of 4,096 tokens and 512 of 4,096 columns, of which 108 are made at a time
    part_ns = whole[product.name].cost.fwd_ns / 8 * (2 * 108 / part) / (10 * 108 / every)
    assert wide[product.name].cost.fwd_ns == pytest.approx(part_ns + exchanged, rel=1e-3)
    table = costs.table(Size(4), 0)
    assert [op.cost.bwd_ns for op in costs.graph(Size(4), 0).ops] == table.columns[1].astype(int).tolist()


def test_beside_computes_exchanges_of_a_backward_count_where_they_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(llama, 3)
    beside = costs_of(graph, 8).graph(Size(4), 0)
    monkeypatch.setattr(GroupCosts, "_may_overlap", False)
    alone = costs_of(graph, 8).graph(Size(4), 0)
    products = {op.name for op in graph.ops if op.module.endswith(("_proj", "lm_head"))}
    hidden = again = kept = 0
    for one, other in zip(beside.ops, alone.ops, strict=True):
        a, b = one.cost, other.cost
        assert (a.fwd_ns, a.weight_ns, a.weight_bytes) == (b.fwd_ns, b.weight_ns, b.weight_bytes)
        assert b.hidden_ns == 0 and a.saved_bytes <= b.saved_bytes
        assert a.saved_bytes == b.saved_bytes or one.name in products
        if one.module.startswith("model.layers.1"):
            hidden, again = hidden + a.hidden_ns, again + a.bwd_ns + a.hidden_ns - b.bwd_ns
            kept += b.saved_bytes - a.saved_bytes
    link, x = NODE.levels[0].link, 4 * TOKENS * 4096 * 2
    exchange_ns = link.latency_ns + x * 7 / 8 * 1e9 / link.bytes_per_s
    assert 2.4 * exchange_ns < hidden <= 4.01 * exchange_ns  # there are four, and small products of weights
    assert 0 <= again < 0.2 * hidden  # what products of inputs do not hide of what is gathered once more
    assert kept == pytest.approx(2 * x * 7 / 8, rel=0.01)


def test_gradients_of_whole_parameters_are_summed_once_a_step() -> None:
    graph = costs_of(graph_of(llama), 8).graph(Size(4), 0)
    link, params = NODE.levels[0].link, graph.param_map()
    norm = params["model.norm.weight"]  # bf16, summed in fp32
    assert norm.once_ns == int(2 * 7 / 8 * 4096 * 4 * 1e9 / link.bytes_per_s) > 0
    assert params["model.layers.0.self_attn.q_proj.weight"].once_ns == 0
    names = tuple(op.name for op in graph.ops)
    estimator = Estimator(NODE, costs_of(graph_of(llama), 8))
    without = Estimator(NODE, replace(estimator.cost_model, cluster=replace(NODE, levels=(FAST,))))
    context = StageContext(Stage(names, (0,)), 4, 1, 1, True, 1, 0, 0, 0)
    found, other = estimator.stage(context), without.stage(context)
    assert found.optimizer_ns - other.optimizer_ns == sum(p.once_ns for p in graph.params)


def test_all_ranks_of_a_group_send_through_the_ports_of_their_host() -> None:
    hosts = parse_cluster("h100x8:4")
    outer = hosts.levels[1].link
    assert grouped(hosts, 8).levels[0].link == replace(outer, bytes_per_s=outer.bytes_per_s // 8)
    inner, ports = (level.link for level in grouped(hosts, 2).levels)
    assert inner == hosts.levels[0].link and ports.bytes_per_s == outer.bytes_per_s // 2


def test_small_parts_of_products_fill_less_of_a_device() -> None:
    graph = graph_of(llama)
    parts = [costs_of(graph, t).graph(Size(4), 0).op_map() for t in (2, 8)]
    name = next(op.name for op in graph.ops if op.module.endswith("k_proj"))  # of 1,024 columns 512, and 128
    whole = graph.op_map()[name].cost.fwd_ns
    shares = [whole / t / part[name].cost.fwd_ns for t, part in zip((2, 8), parts, strict=True)]
    assert shares == pytest.approx([3 * 128 / (2 * 256), 3 * 32 / 256], rel=1e-2)


def test_groups_join_like_ranks_next_to_each_other() -> None:
    assert group_sizes(NODE) == [1, 2, 4, 8]
    other = replace(NODE.devices[0], memory_bytes=2 * NODE.devices[0].memory_bytes)
    unlike = replace(NODE, devices=(*NODE.devices[:6], other, other))
    assert group_sizes(unlike) == [1, 2]
    with pytest.raises(UsageError, match="tensor_parallel is 4"):
        grouped(unlike, 4)
    assert grouped(NODE, 4).levels[0].size == 2

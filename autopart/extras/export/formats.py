"""The list of trainers whose words a plan can be written in, and Megatron's layouts.

A layout has a letter for each layer, in order: E the embedding, t a layer, L the loss; `|` ends a stage, and stage i is
on rank i modulo the ranks of a pipeline.  `x*3` and `(..)*3` repeat; commas mean nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autopart.extras.export.facts import Facts, facts_of
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan

_MOST = 1 << 16
"""Letters of a layout."""
_REPEATED = (r"\(([^()]*)\)\*(\d{1,5})", r"([A-Za-z])\*(\d{1,5})")
_TITAN = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_ZERO_BUBBLE = {"patch_zero_bubble": True, "enable_zero_bubble": True}
_PRIMUS = {"zb-h1": _ZERO_BUBBLE, "zb-v": {**_ZERO_BUBBLE, "zero_bubble_v_schedule": True}}


def exported(plan: Plan, graph: Graph, name: str) -> str:
    """Return a plan in the words of a trainer, and in comments what it has no word for.

    graph: the captured graph of the plan.  Raises UsageError for an unknown trainer, and for a plan that nothing there
    is near.
    """
    if name not in FORMATS:
        raise UsageError(f"no trainer {name!r} is known", fix=f"use --export {' or '.join(FORMATS)}")
    facts = facts_of(plan, graph)
    unsaid = list(facts.unsaid)
    lines = list(FORMATS[name](plan, graph, facts, unsaid))
    return "\n".join([*lines, *(f"# no word for {what}" for what in unsaid)]) + "\n"


def layout_text(layers: Sequence[Sequence[int]]) -> str:
    """Return the layout of stages with these layers: "Et*3|t*3L"."""
    return f"E{'|'.join(f't*{len(own)}' if own else '' for own in layers)}L"


def read_layout(text: str) -> tuple[int, ...]:
    """Return the number of layers on each stage of a layout.  Raises UsageError for anything else."""
    plain = re.sub(r"[,\s]", "", text)
    for pattern in _REPEATED:
        if sum(len(what) * int(count) for what, count in re.findall(pattern, plain)) > _MOST:
            raise UsageError(f"the layout has more than {_MOST} letters", fix="check its numbers")
        plain = re.sub(pattern, lambda found: found[1] * int(found[2]), plain)
    if not re.fullmatch(r"E[t|]*L", plain):
        why = "from E, the embedding, to L, the loss, t is a layer and | ends a stage"
        raise UsageError(f"{text!r} is not a layout of one list of layers", why=why, fix='write "Et*3|t*4|t*3L"')
    return tuple(stage.count("t") for stage in plain.split("|"))


def _megatron_words(plan: Plan, graph: Graph, facts: Facts) -> dict[str, Any]:
    dtypes = [param.dtype for param in graph.params if param.kind == "param"]
    most = {"bfloat16": "bf16", "float16": "fp16"}.get(max(set(dtypes), key=dtypes.count, default=""), "fp32")
    precision = plan.provenance.precision if plan.provenance.precision != "fp32" else most
    counts = max(map(len, facts.again))
    layout = {"pipeline_model_parallel_layout": layout_text(facts.layers)} if len(facts.layers) > 1 else {}
    return {
        "tensor_model_parallel_size": facts.shards,
        "pipeline_model_parallel_size": facts.pipeline,
        **layout,
        "micro_batch_size": facts.micro_rows,
        "global_batch_size": sum(plan.micro_rows),
        **({"use_distributed_optimizer": True} if plan.decision.zero else {}),
        **({"use_tp_pp_dp_mapping": True} if facts.apart else {}),
        **({precision: True} if precision != "fp32" else {}),
        **({"recompute_granularity": "full", "recompute_method": "block"} if counts else {}),
        **({"recompute_num_layers": counts} if counts else {}),
    }


def _name_schedule(plan: Plan, facts: Facts, unsaid: list[str]) -> None:
    known = "interleaved" if facts.chunks > 1 else "1f1b"
    if plan.schedule != known or not facts.loop:
        unsaid.append(f"schedule {plan.schedule}: {known} runs, whose step is not the simulated one")


def _megatron(plan: Plan, graph: Graph, facts: Facts, unsaid: list[str]) -> Iterator[str]:
    _name_schedule(plan, facts, unsaid)
    least, most = (pick(map(len, facts.again)) for pick in (min, max))
    if least < most:
        unsaid.append(f"{least} to {most} layers of a stage that run again: the first {most} of each do")
    for name, value in _megatron_words(plan, graph, facts).items():
        yield f"--{name.replace('_', '-')}" + ("" if value is True else f" {json.dumps(value)}")


def _primus(plan: Plan, graph: Graph, facts: Facts, unsaid: list[str]) -> Iterator[str]:
    words = _megatron_words(plan, graph, facts) | _PRIMUS.get(plan.schedule, {})
    if plan.schedule not in _PRIMUS:
        _name_schedule(plan, facts, unsaid)
    if len(set(map(len, facts.again))) > 1:
        del words["recompute_method"], words["recompute_num_layers"]
        words["recompute_layer_ids"] = [layer for own in facts.again for layer in own]
    yield "modules:\n  pre_trainer:\n    overrides:"
    for name, value in words.items():
        yield f"      {name}: {json.dumps(value)}"


def _torchtitan(plan: Plan, graph: Graph, facts: Facts, unsaid: list[str]) -> Iterator[str]:
    around, _, layers = facts.stack.rpartition(".")
    modules: list[list[str]] = []
    for kept, paths in zip(facts.layers, facts.modules, strict=True):  # a layer that is cut is whole on one stage
        own = [path.removeprefix(f"{around}.") for path in paths if not path.startswith(f"{facts.stack}.")]
        before = [path for path in own if not modules and path in own[: _before(facts.stack, paths)]]
        modules.append([*before, *(f"{layers}.{i}" for i in kept), *(path for path in own if path not in before)])
    again, every = (sum(map(len, each)) for each in (facts.again, facts.layers))
    if 0 < again < every:
        unsaid.append(f"{again} of {every} layers that run again: all do")
    if plan.decision.zero:
        unsaid.append("sharing the optimizer's state alone: raise data_parallel_shard_degree, which shares weights too")
    yield f"[parallelism]\ntensor_parallel_degree = {facts.shards}\ndata_parallel_shard_degree = 1"
    yield f"data_parallel_replicate_degree = {facts.replicas}\npipeline_parallel_degree = {facts.pipeline}"
    if facts.pipeline > 1:
        named = _TITAN.get(plan.schedule) if facts.loop else None
        yield f"pipeline_parallel_microbatch_size = {facts.micro_rows}"
        yield f'pipeline_parallel_schedule = "{named or "_PipelineScheduleRuntime"}"'
        if named is None:
            yield 'pipeline_parallel_schedule_csv = "schedule.csv"  # autopart schedule PLAN --csv schedule.csv'
        yield f"module_fqns_per_model_part = {json.dumps(modules)}"
    yield f"[training]\nlocal_batch_size = {sum(plan.micro_rows) // facts.replicas}"
    yield f'global_batch_size = {sum(plan.micro_rows)}\n[activation_checkpoint]\nmode = "{"full" if again else "none"}"'


def _before(stack: str, paths: Sequence[str]) -> int:
    """Return how many of the paths come before the layers."""
    return next((i for i, path in enumerate(paths) if path.startswith(f"{stack}.")), len(paths))


FORMATS: Mapping[str, Callable[[Plan, Graph, Facts, list[str]], Iterator[str]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "primus": _primus,
}
"""By name: yields the lines, and appends what has no word."""

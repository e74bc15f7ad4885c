"""Layers in the order of the data flow, and the prefixes of a model: what may freeze while the rest goes on to learn.

A prefix is a set of layers with everything before them: if one of its ops depends on a parameter, that parameter is in
the prefix too.  Its ops then need no backward.  In a chain the first n layers are a prefix; of an encoder and a decoder
that reads it, the first layers of both, but a decoder layer that reads the encoder only with all of the encoder.  Where
a prefix is frozen, a step may begin with the values at its end, if they are known of every sample.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopart.ir.errors import UsageError, shortened
from autopart.ir.graph import Graph
from autopart.passes.graph.cuts import outermost, outermost_fitting

_NUMBERED = re.compile(r"(?:.*\.)?\d+")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    name: path of its module.  params: the parameters that its own ops use.  before: the layers that it depends on, and
    itself.  frozen: the parameters that freeze with it: its own, and those of everything before it, whether in a layer
    or not (embeddings).  Tied names are resolved.
    """

    name: str
    params: frozenset[str]
    before: frozenset[str]
    frozen: frozenset[str]


def layers_of(graph: Graph, patterns: Sequence[str] = ()) -> tuple[Layer, ...]:
    """Return the layers of a model in the order of its data flow: each stands behind those that it depends on.

    patterns: of the paths of modules that are layers (`fnmatch`; of nested ones the outermost counts); (): the
    outermost modules with a number as their last name, as in a ModuleList, that have parameters.  Raises UsageError
    where there are none.  O(ops * (layers + parameters) / word).
    """
    layer_of = outermost_fitting(graph, patterns, "layers=") if patterns else outermost(graph, _NUMBERED.fullmatch)
    learned = {p.name for p in graph.params if p.kind == "param"}
    used: dict[str, set[str]] = {}
    for op in graph.ops:
        if op.module in layer_of:
            used.setdefault(layer_of[op.module], set()).update(learned.intersection(op.params))
    used = {name: params for name, params in used.items() if params}
    if not used:
        raise UsageError(
            "no layers were found that could freeze",
            why="no module with a number for a name has parameters" if not patterns else "the modules have none",
            fix='name them by patterns: layers="encoder.layer.*"',
        )
    before, frozen = _upstream(graph, layer_of, used, learned)
    place = {name: i for i, name in enumerate(used)}
    ordered = sorted(used, key=lambda name: (len(before[name]), place[name]))
    return tuple(Layer(name, frozenset(used[name]), before[name], frozen[name]) for name in ordered)


def _upstream(
    graph: Graph, layer_of: dict[str, str], used: Collection[str], learned: Collection[str]
) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    """Return for each layer the layers, and the parameters, on which any of its ops depends, its own included."""
    names = [*used, *learned]
    bit = {name: 1 << i for i, name in enumerate(used)} | {name: 1 << len(used) + i for i, name in enumerate(learned)}
    of_value: dict[str, int] = {}
    of_layer = dict.fromkeys(used, 0)
    for op in graph.ops:
        mask = 0
        for read in op.reads:
            mask |= of_value.get(read, 0)
        for param in op.params:
            mask |= bit.get(param, 0)
        layer = layer_of.get(op.module, "")
        if layer in of_layer:
            mask |= bit[layer]
            of_layer[layer] |= mask
        of_value.update(dict.fromkeys(op.writes, mask))
    whole = (1 << len(used)) - 1

    def named(mask: int) -> frozenset[str]:
        return frozenset(name for i, name in enumerate(names) if mask >> i & 1)

    return {name: named(m & whole) for name, m in of_layer.items()}, {n: named(m & ~whole) for n, m in of_layer.items()}


def prefix_of(layers: Sequence[Layer], wanted: int | Collection[str]) -> tuple[Layer, ...]:
    """Return the layers of a prefix, in order: the first ones, with all that they depend on, or exactly those named.

    wanted: a number of layers, or names of modules.  Raises UsageError for a number or a name that there is not, and
    for names that are no prefix.  O(layers^2).
    """
    by_name = {layer.name: layer for layer in layers}
    if isinstance(wanted, int):
        if not 0 <= wanted <= len(layers):
            raise UsageError(f"{wanted} layers cannot freeze", why=f"the model has {len(layers)}")
        names = frozenset[str]().union(*(layer.before for layer in layers[:wanted]))
        return tuple(layer for layer in layers if layer.name in names)
    names = frozenset(wanted)
    if unknown := sorted(names - by_name.keys()):
        listed = shortened(", ".join(by_name), 300)
        raise UsageError(f"{unknown[0]!r} is not a layer that could freeze", fix=f"name some of {listed}")
    for name in sorted(names):
        missing = by_name[name].before - names
        if missing:
            first = next(layer.name for layer in layers if layer.name in missing)
            raise UsageError(
                f"layer {name} cannot freeze while {first} learns",
                why=f"{name} comes behind it in the data flow, so gradients would still pass through it",
                fix=f"freeze {first} as well, or leave {name} out",
            )
    return tuple(layer for layer in layers if layer.name in names)


def frozen_end(graph: Graph) -> tuple[str, ...]:
    """Return the values at the end of the frozen prefix, in captured order; () if nothing is frozen.

    They depend on the rows of the inputs and on the model's tensors, but on nothing that learns; what reads them learns
    or follows from something that does, or returns them.  graph: with `Value.rows_axis` of its inputs.  O(reads).
    """
    learning = graph.learning_ops()
    tensors = {param.name for param in graph.params if param.kind != "constant"}
    rowed = {value.name for value in graph.values if value.name in graph.inputs and value.rows_axis is not None}
    of_model, learned = set[str](), set[str]()
    prefix: list[str] = []
    wanted = {*graph.outputs, *(value for _, value in graph.updates)}
    for op in graph.ops:
        if op.name in learning or not learned.isdisjoint(op.reads):
            learned.update(op.writes)
            wanted.update(op.reads)
            continue
        if not (of_model.isdisjoint(op.reads) and tensors.isdisjoint(op.params)):
            of_model.update(op.writes)
        if not rowed.isdisjoint(op.reads):
            rowed.update(op.writes)
        prefix.extend(op.writes)
    return tuple(name for name in prefix if name in of_model and name in rowed and name in wanted)

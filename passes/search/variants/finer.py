"""Cut a search space into more blocks, for plans with several stages a rank."""

from __future__ import annotations

from dataclasses import replace

from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.graph.cuts import forced_bounds, module_span
from autopart.passes.search.space import SearchSpace


def finer_space(space: SearchSpace, blocks: int) -> SearchSpace:
    """Return the space with up to this number of blocks, which can be cut at more places; itself if it has as many.

    O(ops log ops).
    """
    if blocks <= space.chain.n or space.chain.n >= len(space.fine.ops):
        return space
    request, fine = space.request, space.fine
    ends = {place for group in request.keep_together() for place in module_span(fine, group)} - {len(fine.ops)}
    many = coarsen(fine, blocks=blocks, cuts=request.cuts, also=tuple(sorted(ends)))
    chain = BlockChain(many, space.chain.captured, space.chain.cost_model)
    return replace(space, chain=chain, costs=space.costs.over(chain), forced=forced_bounds(many, fine, request.cuts))

"""`VARIANTS`: what is tried on the plans that the search has found, in this order; each entry finds more of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from autopart.passes.search.evaluation import Search
from autopart.passes.search.search import evaluate_arrangements, evaluate_for_comparison, evaluate_layouts, refine_best
from autopart.passes.search.variants.kinds import evaluate_kinds
from autopart.passes.search.variants.orders import evaluate_named, evaluate_searched, refine_ordered
from autopart.passes.search.variants.several import evaluate_several
from autopart.passes.search.variants.slicing import evaluate_slices


class Variant(NamedTuple):
    """One entry, which can be left out: then its plans are not found.

    name: what it tries.  evaluate: makes candidates of what the search has evaluated so far, best first
    (`Search.finalists`), and evaluates them by `Search.evaluate`, which adds them to the results; it is pure but for
    that, and takes what fits no worse if there is nothing yet.  effort: the limit of what it may do, always a count:
    simulated actions if it does not say otherwise.  leaves_family: whether its plans are outside 1F1B's family for
    whole sequences; the others are left out where the search has evaluated all of these.
    """

    name: str
    evaluate: Callable[[Search, int], None]
    effort: int
    leaves_family: bool = False


VARIANTS = (
    Variant("schedules and layouts, even and equal stages", evaluate_layouts, 250_000),
    Variant("unlike devices in other orders", evaluate_arrangements, 100_000),
    Variant("a stage fewer and more, and no replicas", evaluate_for_comparison, 3),
    Variant("moved cuts, devices and rows", refine_best, 250_000),
    Variant("slices of sequences", evaluate_slices, 1_500_000, leaves_family=True),
    Variant("several stages a rank of positions of like devices", evaluate_kinds, 400_000, leaves_family=True),
    Variant("split backwards, several stages a rank", evaluate_named, 300_000, leaves_family=True),
    Variant("several stages a rank of equal positions", evaluate_several, 300_000, leaves_family=True),
    Variant("searched orders", evaluate_searched, 150_000, leaves_family=True),
    Variant("moved cuts under the best other order", refine_ordered, 100_000, leaves_family=True),
)

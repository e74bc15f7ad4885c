"""The space of plans and the search in it: layouts, the partition's dynamic program, evaluation, refinement.

May enter: what proposes and chooses plans. Limits are counts, never clocks.
"""

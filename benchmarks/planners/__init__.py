"""Published planners: each cost model as an evaluator, with a solver at least as good as the original.

They are references and not part of autopart's planner: `benchmarks/planner_objectives.py` and the tests use them.
"""

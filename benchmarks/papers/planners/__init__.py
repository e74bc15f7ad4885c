"""Published planners: each cost model as an evaluator, with a solver at least as good as the original.

They are references and not part of autopart's planner: `benchmarks.papers.planner_objectives` and the tests use them.
"""

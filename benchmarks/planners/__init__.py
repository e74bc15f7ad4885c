"""Published planners as they were: each cost model as an evaluator, with a solver at least as good as the original.

They are our yardsticks, not our planner: `benchmarks/anchors.py` and the tests compare with them.
"""

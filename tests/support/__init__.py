"""Helpers of the tests: jobs of worker processes, models, written inputs (languages) and references (oracles)."""

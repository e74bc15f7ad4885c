"""The position of a run in its data, kept with checkpoints.

May enter: other samplers whose position is counted in steps.
"""

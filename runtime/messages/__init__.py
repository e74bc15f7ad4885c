"""Messages between stages: channels, posting order, rows of values.

May enter: point-to-point transport. Collectives belong to `runtime.sums`.
"""

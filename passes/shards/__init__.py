"""Tensor parallelism: how the ranks of a shard group divide each value, derived from the letters of the op table.

May enter: what is known of an op under a cut, and the choice among such cuts; pure functions over a graph.
"""

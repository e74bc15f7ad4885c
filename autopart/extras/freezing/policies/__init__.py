"""Policies that say which layers freeze, from the norms of their gradients.

May enter: a rule that was published, as a `Policy`.  What a prefix of a model is stands in `passes.graph.prefixes`.
"""

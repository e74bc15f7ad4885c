"""The batch of a call: flattened into tensors, cut into micro-batches, described to ranks that were given none.

May enter: what is known from the batch alone, before any model is traced.
"""

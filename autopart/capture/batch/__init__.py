"""The batch of a call: taken apart into tensors, cut into micro-batches, described to ranks that were given none.

May enter: what is known from the batch alone, before any model is traced.
"""

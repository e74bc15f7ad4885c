"""The batch of a call: read, cut into micro-batches, counted, and weighted.

May enter: values on the way of one batch from `Pipe.step` to the engine.
"""

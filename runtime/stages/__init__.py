"""Forward and backward of one stage: saved tensors, slices, casts, recomputation, batch statistics.

May enter: what computes on one rank between two messages.
"""

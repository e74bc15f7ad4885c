"""Gradients and values over ranks: tied parameters, replicas in buckets, masters, shared optimizer state.

May enter: collectives over tensors of the model.
"""

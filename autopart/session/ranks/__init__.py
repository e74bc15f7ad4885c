"""Ranks in step: calls compared, errors raised on all, failures told.

May enter: agreements over small messages. Tensors of the model are moved elsewhere.
"""

"""Sums of gradients and exchange of values over ranks: tied parameters, replicas, ZeRO.

May enter: collectives over tensors of the model.
"""

"""Agreement between ranks: collective calls compared, errors of one rank raised on all.

May enter: exchanges of small messages.  Tensors of the model are moved by `placement`.
"""

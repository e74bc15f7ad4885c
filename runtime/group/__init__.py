"""The process group as a rank sees it: rendezvous, groups, NCCL's communicators, breaking them.

May enter: what opens, names or ends connections.
"""

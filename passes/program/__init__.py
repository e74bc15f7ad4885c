"""Plan to Program: schedules, routing, one linear order, and the proofs about it (complete, no deadlock, NCCL's rules).

May enter: what orders or checks actions. Times are not known here.
"""

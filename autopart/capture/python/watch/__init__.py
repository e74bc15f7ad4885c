"""What `forward()` and the loss read of Python while they were traced, compared before every step.

May enter: how a read is recorded and how its change is seen. The capture cache decides what follows.
"""

"""What a rank has of a batch and how much its losses weigh.

May enter: values on the way of one batch from `Pipe.step` to the engine.
"""

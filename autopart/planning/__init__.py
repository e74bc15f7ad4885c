"""From a model and a batch to a plan, on one process: capture, costs and passes joined.

May enter: what the options leave open, and how a task is restricted. No process group.
"""

"""Saving a pipe while it runs, and loading it under any plan.

May enter: which rank writes and reads what of a checkpoint, and how all of them agree on it.
"""

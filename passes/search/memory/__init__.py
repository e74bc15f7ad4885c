"""Fitting a plan into memory: what its stages recompute, alone on a rank or together.

May enter: another way to make a plan need less memory.
"""

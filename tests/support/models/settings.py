"""A Python module from which models read a number."""

gamma = 0.5

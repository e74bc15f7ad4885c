"""A module of Python that models read numbers from."""

gamma = 0.5

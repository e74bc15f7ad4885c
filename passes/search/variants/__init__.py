"""What is tried on the best plans so far: sequences in slices, other orders, several stages a rank.

May enter: another way to run plans that the search has found already, judged by the same evaluation.
"""

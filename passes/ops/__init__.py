"""Everything that is known of an op: one row for each, with its axes as letters, what it mixes, saves and computes.

May enter: rows, and what follows from a row alone.
"""

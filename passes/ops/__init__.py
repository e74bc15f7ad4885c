"""The table of ops: one row for each, with its axes as letters, what it mixes, saves and computes; and costs of ops.

May enter: rows, and what follows from a row alone.
"""

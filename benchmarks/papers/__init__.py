"""Compares plans with published ones, under the cost models and on the machines of their papers."""

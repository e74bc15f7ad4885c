"""Holds what several benchmarks use: models, spreads of repeated runs, result files, and stages in one process."""

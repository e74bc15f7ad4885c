"""Trains unmodified architectures of transformers in stages, and compares them with one process."""

"""Measures what happens during long training: freezing, saving, failing and slow ranks, large models."""

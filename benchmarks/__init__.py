"""Measurements and published values that autopart is held against: each answers one question of docs/benchmarks.md."""

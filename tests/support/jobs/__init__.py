"""Functions that tests run on the ranks of a pool; importable there by name."""

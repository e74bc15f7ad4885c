"""Holds functions that save, load and count the state of a run."""

"""Graphs, plans, programs and files written or broken for tests."""

"""Graphs, plans, programs and files that tests write or damage."""

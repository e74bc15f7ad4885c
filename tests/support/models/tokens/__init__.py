"""Holds models of sequences."""

"""Holds random training scripts and what plays them."""

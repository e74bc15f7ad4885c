"""Conclusions from several captures: the batch axis, loss weights, row layouts, the token axis, other sizes.

May enter: comparisons of captures, and numeric trials where rules do not suffice.
"""

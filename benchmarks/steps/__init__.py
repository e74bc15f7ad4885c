"""Measures steps: how fast they are beside those of other libraries, of other plans, and of what a plan allows."""

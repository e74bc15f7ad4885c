"""Measures plans: how good they are, how soon they are found, and whether steps take what they predict."""

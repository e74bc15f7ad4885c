"""Ranks watch each other: heartbeats, who holds up whom, and an end to waiting for what cannot come."""

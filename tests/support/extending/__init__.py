"""Holds what a user may add from outside: ops, schedules, reports, costs, collectives."""

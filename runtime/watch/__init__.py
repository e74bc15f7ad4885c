"""Heartbeats, and which rank holds up which.

May enter: what is asked or told while the main thread waits. Nothing here takes part in a step.
"""

"""A plan on running processes: bring-up, the road of a batch, state, and the pipe that the user holds.

May enter: what joins capture and runtime on every rank. What one rank plays is the runtime's.
"""

"""Asynchronous training (`pipe.train`): a room for what it needs of a session, and for what it refuses.

What is played stands in `passes.program.stream`; how one rank plays it, in `runtime.stream`.
"""

"""Runs that lose ranks: the state that living ranks keep in memory, and ranks that become slow.

May enter: what is kept or judged because a device may fail.  What starts processes again is `runtime.launch`.
"""

"""Runs on devices that change: ranks that become slow.

May enter: what is judged because a device may fail.  What starts processes again is `runtime.launch`; what living ranks
keep of a lost one's state, `extras.checkpoints`.
"""

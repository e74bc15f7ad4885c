"""Numbers while a pipe runs: what the last step took, measured and predicted, and a file of them.

May enter: what is measured of steps, and where it is written.  What is never asked for costs a step two clock readings.
"""

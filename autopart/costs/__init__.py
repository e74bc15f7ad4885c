"""Costs of ops and rates of machines: measured in the running program or alone, or estimated; kept on disk.

May enter: sources of costs, and measurements of devices and links. Plans are not known here.
"""

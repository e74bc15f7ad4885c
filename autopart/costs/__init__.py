"""What ops and machines cost: timed in the running program, alone, or estimated; kept on disk.

May enter: sources of costs and measurements of devices and links. Plans are not known here.
"""

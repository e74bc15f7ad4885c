"""Program to Timeline: loads of links, estimates of stages, memory, and the event simulator.

May enter: what predicts times and bytes. Assumptions stand at the top of each file.
"""

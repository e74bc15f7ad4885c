"""Local processes: started, supervised, ended; the first cause of a failure is raised once.

May enter: what the parent and its workers do around a function call.
"""

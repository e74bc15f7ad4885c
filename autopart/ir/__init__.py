"""The languages of the compiler: Graph, Plan, Program and Timeline; the machines they run on; the errors.

May enter: frozen dataclasses of names, integers and tuples, with their `check` functions.
Only the standard library is imported. No passes, no reports, nothing that reads the environment.
"""

"""The languages of the compiler: Graph, Plan, Program, Timeline, and the machines and errors they speak about.

May enter: frozen dataclasses of names, integers and tuples, their `check` functions and their text form.
The standard library alone is imported. No pass, no report, nothing that reads the environment.
"""

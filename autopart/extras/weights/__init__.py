"""Values for a model that was built on the meta device: each rank makes what it holds, and nothing else.

May enter: where values come from, and what is checked of them before a rank plans.
"""

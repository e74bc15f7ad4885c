"""From a model and a batch to a plan, on one process: capture, costs and passes joined.

May enter: what the request leaves open and how it is relaxed. No process group.
"""

from autopart.planning.make import Planned, make_plan, plan_key, precision_of, read_plan

__all__ = ["Planned", "make_plan", "plan_key", "precision_of", "read_plan"]

"""From a model and a batch to a plan, on one process: capture, loss rule, costs, passes."""

from autopart.planning.make import Planned, make_plan, plan_key, precision_of, read_plan

__all__ = ["Planned", "make_plan", "plan_key", "precision_of", "read_plan"]

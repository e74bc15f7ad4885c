"""The search for a plan: what may be chosen, proposals, their evaluation, and the plan handed out."""

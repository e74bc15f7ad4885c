"""Another plan while training goes on: whether it pays, and the optimizer's state that moves with it.

A new file here is another thing that follows the plan.  What moves the model's own tensors is `session.placement`."""

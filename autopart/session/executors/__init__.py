"""What runs a kind of batch on this rank: a program for it, along the stages of the plan.

A new mode of running a batch is a new file here."""

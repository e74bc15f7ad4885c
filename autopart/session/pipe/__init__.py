"""What users hold: `Pipe`, one object on every rank, in layers: state, plan, running.

Methods that users call go here; what they do goes into the rooms below."""

"""What users hold: `Pipe`, one object on every rank, in layers: state, plan, running; and the rows of the extras.

Methods that users call go here; what they do goes into the rooms below.
"""

from autopart.pipe import rows as rows

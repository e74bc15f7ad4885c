"""model + batch -> Captured(module, graph): every fact that needs torch is read here.

batch.py      a batch taken apart, cut and put together      guards.py     what export would lose silently
export.py     torch.export inside a thin wrapper             lower.py      flat, functional, random ops by key
names.py      which name stands for which node               gradients.py  through which values gradients flow
read.py       fx graph -> Graph                              rows.py       which axis of a value is the batch
capture.py    the steps above in order                       capturer.py   each capture of a model made once
state.py      what forward() assigns to attributes           functional.py each distinct op made functional once
alike.py      calls that torch is asked about once           grow.py       one capture at another number of rows
probe.py      rows shown independent by running them         where.py      from Python stacks to the user's line
"""

from autopart.capture.cache import CaptureCache
from autopart.capture.capture import Captured, capture

__all__ = ["CaptureCache", "Captured", "capture"]

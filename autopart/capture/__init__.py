"""model + batch -> Captured(module, graph): every fact that needs torch is read here.

`capture.py` makes one capture step by step, `cache.py` each capture of a model once.  The rooms build on each other:
`batch`, then `reads` and `watch`, `habits`, `trace`; `derive` concludes from several captures.  May enter: what has to
be read from a model or a batch with torch; each room says what belongs into it.
"""

from autopart.capture.cache import CaptureCache
from autopart.capture.capture import Captured, capture

__all__ = ["CaptureCache", "Captured", "capture"]

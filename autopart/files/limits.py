"""How much a file may hold: of plans, clusters and what is kept between runs.

Anyone may have written a file, and reading one must end soon, whatever it says.  Limits are counts, never clocks, so
that a file is accepted everywhere or nowhere; they are such that no file takes more than about 2 s of one core and
200 MB (tests/files/test_hostile_files.py).  `reading` and `documents` enforce what holds for every file, before
anything looks at what the file says.
"""

from __future__ import annotations

MAX_BYTES = 12 * 2**20
"""Of a JSON file; a plan of 100 000 ops has 4 MiB."""
MAX_VALUES = 400_000
"""Of a JSON file, counted by commas and brackets; the same plan has a quarter of that, or where each op is recomputed
alone nearly all."""
MAX_BYTES_BY_HAND = 128 * 2**10
"""Of a YAML or TOML file: their parsers are written in Python, and need a second for that much."""
MAX_VALUES_BY_HAND = 15_000
"""Of a YAML or TOML file, aliases spelled out: a thousand unlike devices."""
MAX_DEPTH = 32
"""Of objects and lists inside each other; plans have 6.  Far from Python's limit of recursion."""
MAX_DOTS = 1000
"""Of a line of TOML: a key of many parts takes time that grows with the square of their number."""
MAX_DIGITS = 19
"""Of a whole number; long ones take time that grows with the square."""
MAX_INTEGER = 2**63 - 1
"""Of any number: 290 years in nanoseconds, 8 EiB.  Sums of millions of these still are floats, and passes count in 64
bits."""
MAX_RANKS = 1 << 16
"""Devices of a cluster, ranks of a plan: simulation and tables have an entry for each."""
MAX_ROWS = 2**31 - 1
"""Of a micro-batch: bytes of its values stay within 64 bits."""
MAX_LEVELS = 16
"""Of links in a cluster: every message looks for its own; machines have 2 to 4."""
MAX_RATES = 64
"""Of one device; torch has some 30 dtypes."""
MAX_OP_NS = 3600 * 10**9
"""Of one op, measured: an hour is a mistake."""
MOST_COSTS = 100_000
"""Measured ops that are kept, the newest: within `MAX_VALUES`, 3 for each."""
MOST_PLANS = 200
"""Plans that are kept, the newest."""
LOCK_SECONDS = 10.0
"""To wait for another process that writes: a stopped one must not stop us.  What is not written is measured again."""
MOST_PROBLEMS = 20_000
"""Of one file that are listed, as each takes memory."""
SHOWN = 20
"""Problems and differences that a message lists."""
SHOWN_CHARACTERS = 60
"""Of a value or a key that a message quotes."""

"""Limits of files: plans, clusters, and files kept between runs.

Anyone may have written a file, and reading it must be quick.  Limits are counts, never times, so that a file is
accepted everywhere or nowhere; within them no file takes more than about 2 s of one core and 200 MB
(tests/files/test_hostile_files.py).
"""

from __future__ import annotations

MAX_BYTES = 12 * 2**20
"""Size of a JSON file; a plan of 100 000 ops has 4 MiB."""
MAX_VALUES = 400_000
"""Values of a JSON file, counted by commas and brackets; a plan of 100 000 ops has a quarter of that, or nearly all if
each op is recomputed alone."""
MAX_BYTES_BY_HAND = 128 * 2**10
"""Size of a YAML or TOML file; their parsers are written in Python and need a second for it."""
MAX_VALUES_BY_HAND = 15_000
"""Values of a YAML or TOML file, aliases expanded: a thousand different devices."""
MAX_DEPTH = 32
"""Depth of nested objects and lists; plans have 6."""
MAX_DOTS = 1000
"""Dots in a line of TOML."""
MAX_DIGITS = 19
"""Digits of a whole number; parsing time grows with their square."""
MAX_INTEGER = 2**63 - 1
"""Largest number: 290 years in nanoseconds, 8 EiB."""
MAX_RANKS = 1 << 17
"""Devices of a cluster, and ranks of a plan."""
MAX_ROWS = 2**31 - 1
"""Rows of a micro-batch; bytes of its values stay within 64 bits."""
MAX_LEVELS = 16
"""Levels of a cluster; machines have 2 to 4."""
MAX_RATES = 64
"""Rates of one device; torch has some 30 dtypes."""
MAX_OP_NS = 3600 * 10**9
"""Measured time of one op; an hour is a mistake."""
MOST_COSTS = 100_000
"""Measured ops that are kept, the newest; each has 3 values of `MAX_VALUES`."""
MOST_PLANS = 200
"""Plans that are kept, the newest."""
LOCK_SECONDS = 10.0
"""Time to wait for another process that writes to the same file, since it may be stopped."""
MOST_PROBLEMS = 20_000
"""Problems of one file that are collected, as each takes memory."""
SHOWN = 20
"""Problems and differences that a message lists."""
SHOWN_CHARACTERS = 60
"""Characters of a value or a key that a message quotes."""

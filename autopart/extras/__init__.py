"""What a user may want and the core can do without: one folder each.

The core never imports an extra, and no extra another one; what two of them share moves down (`state`, `files`).  May
enter: a capability that hangs on the core's lists (`session.lists`, `stagecode.compilers`) and on the pipe, with its
tests and its page of docs.
"""

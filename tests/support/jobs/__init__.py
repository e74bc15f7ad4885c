"""Functions that tests run on the ranks of a worker pool. The pool imports them by name."""

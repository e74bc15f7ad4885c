"""One rank's part of a running pipeline; it plays a program and decides nothing."""

if __name__ != "autopart.runtime":
    raise ImportError("import autopart.runtime, not runtime: this would be a second copy of its types")

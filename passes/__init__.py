"""Pure functions from one frozen language to the next; no torch here."""

if __name__ != "autopart.passes":
    raise ImportError("import autopart.passes, not passes: this would be a second copy of its types")

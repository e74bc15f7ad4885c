"""Pure functions from one frozen language to the next; no torch here."""

if __name__ != "autopart.passes":
    raise ImportError("import autopart.passes, not passes: a second copy of these modules would not be the same types")

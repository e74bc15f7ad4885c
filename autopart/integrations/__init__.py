"""Training loops of other libraries that run a pipeline, through the hooks that these libraries offer.

May enter: one file for each library, imported by the user by name.  Nothing of a library is replaced or patched, and
what its interface does not allow is refused by name.
"""

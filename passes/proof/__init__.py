"""Lower bounds and certificates of plans; the only importer of OR-Tools.

May enter: proofs that do not look at what the search found.
"""

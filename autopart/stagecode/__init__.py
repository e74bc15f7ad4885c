"""The code of a rank's stages, cut out of the captured graph: whole, with replicas' random numbers, or by slices.

May enter: rewrites of captured graphs into what the runtime calls.
"""

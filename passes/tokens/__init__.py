"""The token axis: what grows with the tokens, a proof of causality, the recipe and lengths of slices (TeraPipe).

May enter: rules about tokens; each has a test that breaks without it.
"""

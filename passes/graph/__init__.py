"""Graph to Graph: clones of cheap ops, coarsening into blocks, legal cuts, the chain of blocks.

May enter: passes that know neither plans nor machines.
"""

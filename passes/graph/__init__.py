"""Graph to graph: clones of free ops, coarsening into blocks, cuts, and what ranges of blocks cost."""

"""How the losses of micro-batches combine to the loss of the batch, or why they cannot.

May enter: rules of that analysis; they read the graph and its captures at several sizes, never a number of a tensor.
"""

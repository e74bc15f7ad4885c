"""How the losses of micro-batches combine to the loss of the batch, or why they cannot."""

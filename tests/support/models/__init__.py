"""Models and batches that tests train."""
